"""The client against a server: what it sends, when it sends it again, and that its methods are those of the server."""

import asyncio
import importlib.util
import inspect
import json
import sys
import threading
from dataclasses import fields
from http import HTTPStatus
from pathlib import Path

import httpx
import pytest
from test_gateway import listening

from nestrec.client import AsyncClient, Client, RequestError, ServerBusyError
from nestrec.client.attempts import RetryState
from nestrec.client.client_transport import NotSentError, run_blocking
from nestrec.serving.core.http_client import Request, Response
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.fleet.readiness_probes import free_port
from nestrec.serving.http.http_app import App
from nestrec.serving.http.routes import ENDPOINTS

DOCS = Path(__file__).parents[2] / "docs"
HISTORY = {"items": ["1", "2"], "times_ms": [1, 2]}


def test_both_clients_ask_a_server(service):
    async def run():
        async with listening(App(service, LimitsConfig(default_timeout_ms=10_000))) as port:
            url = f"http://127.0.0.1:{port}"
            return await asyncio.to_thread(_ask, url), await _ask_without_waiting(url)

    answers, others = asyncio.run(run())
    assert others == answers
    assert [*answers[0]["models"]] == ["retrieval"]
    assert answers[1:3] == [{"events": 2}, True]
    assert len(answers[3]) == 2
    assert answers[4] == 3
    assert answers[5:] == ["history", 400]


def _ask(url):
    with Client(url) as client:
        told = [client.models(), client.events("a b", HISTORY), "admitted" in client.preinfer("a b")]
        told += [client.rank("a b", ["3", 4], now_ms=9)["scores"].popitem()[1]]
        told += [len(client.recommend("a b", k=3)["items"])]
        client.forget_cache("a b")
        client.forget_events("a b")
        with pytest.raises(RequestError) as refused:
            client.recommend("a b")
        return [*told, refused.value.field, refused.value.status]


async def _ask_without_waiting(url):
    async with AsyncClient(url) as client:
        told = [await client.models(), await client.events("a b", HISTORY)]
        told += ["admitted" in await client.preinfer("a b")]
        told += [(await client.rank("a b", ["3", 4], now_ms=9))["scores"].popitem()[1]]
        told += [len((await client.recommend("a b", k=3))["items"])]
        await client.forget_cache("a b")
        await client.forget_events("a b")
        with pytest.raises(RequestError) as refused:
            await client.recommend("a b")
        return [*told, refused.value.field, refused.value.status]


def test_examples_of_the_documents_are_answered(service):
    spec = importlib.util.spec_from_file_location("request_examples", DOCS / "request_examples.py")
    request_examples = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(request_examples)
    app = App(service, LimitsConfig(default_timeout_ms=10_000))

    async def run():
        async with listening(app) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as http:
            described, called = (await http.get("/openapi.json")).json(), []
            for title, _, curl, python in request_examples.examples(described, set(dir(Client))):
                assert request_examples.URL in curl
                if "/admin/" not in title and title != "POST /v1/items":  # which is for models with features
                    method = title.split()[0]
                    target = curl.partition(request_examples.URL)[2].split()[0]
                    body = json.loads(curl.partition("-d '")[2].rstrip("'")) if "-d" in curl else None
                    assert (await http.request(method, target, json=body)).status_code < 300, title
                if python:
                    called.append(title)
                    await asyncio.to_thread(exec, python.replace(request_examples.URL, str(http.base_url)), {})
            return called

    assert len(asyncio.run(run())) == 7


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("name", ["preinfer", "rank", "recommend", "events"])
def test_methods_take_what_the_server_does(kind, name):
    known = {field.name for field in fields(ENDPOINTS.find(name).request)} - {"timeout_ms"}
    parameters = inspect.signature(getattr(kind, name)).parameters
    columns = {"items", "times_ms", "actions", "features"}  # of the history
    taken = set(parameters) - {"self", "deadline_s", "at_least_once"}
    assert taken == known | columns
    assert all(parameters[column].kind is inspect.Parameter.KEYWORD_ONLY for column in columns)


def test_client_takes_histories_in_one_style():
    columns = {"items": ["1"], "times_ms": [2], "actions": ["buy"], "features": {"tab": ["home"]}}
    server = Scripted(*[(200, {})] * 8)
    client = server.client()
    for history in (columns, {"history": columns}):
        client.events("ann", **history)
        client.recommend("ann", **history)
        client.rank("ann", ["3"], **history)
        client.preinfer("ann", **history)
    bodies = [json.loads(request.read()) for request in server.requests]
    assert [body["history"] for body in bodies] == [columns] * 8
    with pytest.raises(TypeError, match="either history or items, times_ms, actions, features"):
        client.recommend("ann", history=columns, **columns)
    with pytest.raises(TypeError, match=r"give the events, such as items="):
        client.events("ann")


def test_unknown_user_message_says_what_to_do(service):
    async def run():
        async with listening(App(service, LimitsConfig(default_timeout_ms=10_000))) as port:
            return await asyncio.to_thread(ask, f"http://127.0.0.1:{port}")

    def ask(url):
        refused = []
        with Client(url) as client:
            for given in ({}, {"items": []}, {"items": ["nobody knows it"]}):
                with pytest.raises(RequestError) as error:
                    client.recommend("new", times_ms=[1] * len(given.get("items", ())) or None, **given)
                refused.append(error.value)
        return refused

    without, empty, unknown = asyncio.run(run())
    assert (without.field, without.message) == ("history", "is needed: the server has no events of this user yet")
    assert empty.message == "is empty: the model needs at least one event to recommend from"
    assert unknown.message == "contains no item that the model knows yet"
    assert all("POST /v1/events" in error.remedy and error.remedy in str(error) for error in (without, empty, unknown))


@pytest.mark.parametrize("name", ["preinfer", "rank", "recommend", "events", "forget_events", "forget_cache", "models"])
def test_client_methods_look_like_those_of_async_client(name):
    method, other = getattr(Client, name), getattr(AsyncClient, name)
    assert inspect.signature(method) == inspect.signature(other)
    assert (method.__name__, method.__qualname__, method.__doc__) == (name, f"Client.{name}", other.__doc__)
    assert inspect.iscoroutinefunction(other)
    assert not inspect.iscoroutinefunction(method)


def test_client_needs_neither_event_loop_nor_thread(waits):
    server = Scripted(*[(503, {"retry-after": "1"}), (200, {})] * 2)
    num_threads = threading.active_count()

    async def inside_of_a_loop():  # as in a notebook
        return server.client().rank("ann", ["1"])

    assert server.client().rank("ann", ["1"]) == asyncio.run(inside_of_a_loop())
    assert waits == [1.0, 1.0]
    assert threading.active_count() == num_threads


def test_client_refuses_a_transport_that_suspends():
    with pytest.raises(RuntimeError, match="give it a transport that blocks"):
        run_blocking(asyncio.sleep(0))


def test_async_client_takes_a_transport_of_its_own(monkeypatch):
    monkeypatch.setitem(sys.modules, "nestrec.client.httpx_transports", None)  # no httpx is needed then

    class ScriptedTransport:
        def __init__(self):
            self.requests = []
            self.sleeps = []
            self.is_closed = False
            self.answers = [NotSentError("refused"), EOFError("ended"), Response(503, {b"retry-after": b"3"}, b"")]

        async def send(self, request, *, timeout_s):
            self.requests.append(request)
            answer = self.answers.pop(0) if self.answers else Response(200, {}, b'{"models":{}}')
            if isinstance(answer, Exception):
                raise answer
            return answer

        async def sleep(self, seconds):
            self.sleeps.append(seconds)

        async def close(self):
            self.is_closed = True

    async def run():
        transport = ScriptedTransport()
        async with AsyncClient("http://server/prefix/", key="secret", transport=transport) as client:
            assert await client.models() == {"models": {}}
            await client.forget_events("a/b")
        return transport

    found = asyncio.run(run())
    assert (
        found.requests[:4]
        == [Request("GET", "http://server/prefix/v1/models", {b"authorization": b"Bearer secret"})] * 4
    )
    assert found.requests[4].url == "http://server/prefix/v1/users/a%2Fb/events"
    assert (len(found.sleeps), found.sleeps[2], found.is_closed) == (3, 3.0, True)


class Scripted:
    """Answers in their order, and what was asked."""

    def __init__(self, *answers):
        self._answers = list(answers)
        self.requests = []

    def __call__(self, request):
        self.requests.append(request)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        status, headers = answer
        return httpx.Response(status, headers=headers, json={"error": {"message": HTTPStatus(status).phrase}})

    def client(self, **options):
        return Client("http://server", transport=httpx.MockTransport(self), **options)


@pytest.fixture
def waits(monkeypatch):
    """Seconds that clients would have waited; time goes on by them."""
    now, found = [0.0], []

    def sleep(seconds):
        found.append(seconds)
        now[0] += seconds

    monkeypatch.setattr("nestrec.client.httpx_transports.time.sleep", sleep)
    monkeypatch.setattr("nestrec.client.clients.time.monotonic", lambda: now[0])
    return found


def test_refusals_are_asked_again_when_the_server_says_within_the_deadline(waits):
    server = Scripted((429, {"retry-after": "1"}), (503, {"retry-after": "2"}), (200, {}))
    server.client(deadline_s=4.0).rank(7, ["1"])
    assert waits == [1.0, 2.0]
    left = [int(request.read().partition(b'"timeout_ms":')[2].rstrip(b"}")) for request in server.requests]
    assert left == [4000, 3000, 1000], "the server is told what is left"
    assert len({request.headers["x-nestrec-user"] for request in server.requests}) == 1
    waits.clear()
    with pytest.raises(ServerBusyError) as busy:
        Scripted((503, {"retry-after": "3"})).client(deadline_s=2.0).rank(7, ["1"])
    assert (busy.value.status, busy.value.retry_after_s, waits) == (503, 3.0, []), "it does not wait in vain"


def test_a_server_that_is_not_reached_is_tried_until_the_deadline(waits):
    gone = [httpx.ConnectError("refused"), httpx.ReadError("reset"), httpx.RemoteProtocolError("ended")]
    Scripted(*gone, (200, {})).client().recommend("a")
    assert len(waits) == 3
    assert waits[0] < waits[2]
    with pytest.raises(ServerBusyError, match="not reached"):
        Scripted(*[httpx.ConnectError("refused")] * 99).client(deadline_s=1.0).recommend("a")
    with Client(f"http://127.0.0.1:{free_port()}", deadline_s=0.05) as client, pytest.raises(ServerBusyError):
        client.models()


def test_events_are_not_sent_twice_unless_that_is_wanted(waits):
    unknown = ((503, {"retry-after": "1"}), httpx.ReadError("reset"))
    for answer in unknown:
        server = Scripted(answer, (202, {}))
        with pytest.raises(ServerBusyError):
            server.client().events("a", HISTORY)
        server.client().events("a", HISTORY, at_least_once=True)
        server = Scripted(answer, (202, {}))
        server.client().events("a", HISTORY, at_least_once=True)
        assert len(server.requests) == 2
    for known in ((429, {"retry-after": "1"}), httpx.ConnectError("refused")):
        Scripted(known, (202, {})).client().events("a", HISTORY)


def test_what_is_wrong_with_a_request_is_said_at_once(waits):
    attempts = RetryState(5.0, is_repeatable=True, now_s=lambda: 0.0)
    with pytest.raises(RequestError, match="history: is needed") as wrong:
        attempts.answered(400, {}, {"error": {"message": "is needed", "field": "history"}})
    assert not isinstance(wrong.value, ServerBusyError)
    with pytest.raises(RequestError, match="status 502"):
        attempts.answered(502, {}, None)
    assert Scripted((200, {})).client(key="secret").models() is not None
    server = Scripted((200, {}))
    server.client(key="secret").models()
    assert server.requests[0].headers["authorization"] == "Bearer secret"
