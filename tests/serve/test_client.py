"""Python clients: requests, retries, deadlines, and agreement of their methods with the server's endpoints."""

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


def test_client_and_async_client_get_equal_responses(service):
    async def run():
        async with listening(App(service, LimitsConfig(default_timeout_ms=10_000))) as port:
            url = f"http://127.0.0.1:{port}"
            return await asyncio.to_thread(_use_client, url), await _use_async_client(url)

    results, async_results = asyncio.run(run())
    assert async_results == results
    assert [*results[0]["models"]] == ["retrieval"]
    assert results[1:3] == [{"events": 2}, True]
    assert len(results[3]) == 2
    assert results[4] == 3
    assert results[5:] == ["history", 400]


def _use_client(url):
    with Client(url) as client:
        results = [client.models(), client.events("a b", HISTORY), "admitted" in client.preinfer("a b")]
        results += [client.rank("a b", ["3", 4], now_ms=9)["scores"].popitem()[1]]
        results += [len(client.recommend("a b", k=3)["items"])]
        client.forget_cache("a b")
        client.forget_events("a b")
        with pytest.raises(RequestError) as error:
            client.recommend("a b")
        return [*results, error.value.field, error.value.status]


async def _use_async_client(url):
    async with AsyncClient(url) as client:
        results = [await client.models(), await client.events("a b", HISTORY)]
        results += ["admitted" in await client.preinfer("a b")]
        results += [(await client.rank("a b", ["3", 4], now_ms=9))["scores"].popitem()[1]]
        results += [len((await client.recommend("a b", k=3))["items"])]
        await client.forget_cache("a b")
        await client.forget_events("a b")
        with pytest.raises(RequestError) as error:
            await client.recommend("a b")
        return [*results, error.value.field, error.value.status]


def test_client_request_examples_of_docs_work(service):
    spec = importlib.util.spec_from_file_location("request_examples", DOCS / "request_examples.py")
    request_examples = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(request_examples)
    app = App(service, LimitsConfig(default_timeout_ms=10_000))

    async def run():
        async with listening(app) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as http:
            openapi = (await http.get("/openapi.json")).json()
            called = []
            for title, _, curl, python in request_examples.examples(openapi, set(dir(Client))):
                assert request_examples.URL in curl
                if "/admin/" not in title and title != "POST /v1/items":  # new items need a model with features
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
def test_client_methods_accept_endpoint_fields(kind, name):
    request_fields = {field.name for field in fields(ENDPOINTS.find(name).request)} - {"timeout_ms"}
    parameters = inspect.signature(getattr(kind, name)).parameters
    columns = {"items", "times_ms", "actions", "features"}  # of the history
    accepted = set(parameters) - {"self", "deadline_s", "at_least_once"}
    assert accepted == request_fields | columns
    assert all(parameters[column].kind is inspect.Parameter.KEYWORD_ONLY for column in columns)


def test_client_accepts_history_or_its_columns():
    columns = {"items": ["1"], "times_ms": [2], "actions": ["buy"], "features": {"tab": ["home"]}}
    server = ScriptedServer(*[(200, {})] * 8)
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
    with pytest.raises(TypeError, match=r"events are missing: pass items="):
        client.events("ann")


def test_client_unknown_user_error_suggests_events(service):
    async def run():
        async with listening(App(service, LimitsConfig(default_timeout_ms=10_000))) as port:
            return await asyncio.to_thread(errors_of, f"http://127.0.0.1:{port}")

    def errors_of(url):
        errors = []
        with Client(url) as client:
            for history in ({}, {"items": []}, {"items": ["unknown item"]}):
                with pytest.raises(RequestError) as error:
                    client.recommend("new", times_ms=[1] * len(history.get("items", ())) or None, **history)
                errors.append(error.value)
        return errors

    without, empty, unknown = asyncio.run(run())
    assert (without.field, without.message) == ("history", "is required: the server has no events of this user yet")
    assert empty.message == "must not be empty: the model needs at least one event to recommend items"
    assert unknown.message == "must contain at least one item that the model knows"
    assert all(
        "POST /v1/events" in error.remedy and error.remedy[1:] in str(error) for error in (without, empty, unknown)
    )


@pytest.mark.parametrize("name", ["preinfer", "rank", "recommend", "events", "forget_events", "forget_cache", "models"])
def test_client_methods_have_async_client_signatures(name):
    method = getattr(Client, name)
    async_method = getattr(AsyncClient, name)
    assert inspect.signature(method) == inspect.signature(async_method)
    assert (method.__name__, method.__qualname__, method.__doc__) == (name, f"Client.{name}", async_method.__doc__)
    assert inspect.iscoroutinefunction(async_method)
    assert not inspect.iscoroutinefunction(method)


def test_client_needs_neither_event_loop_nor_thread(waits):
    server = ScriptedServer(*[(503, {"retry-after": "1"}), (200, {})] * 2)
    num_threads = threading.active_count()

    async def rank_in_event_loop():  # as in a notebook
        return server.client().rank("ann", ["1"])

    assert server.client().rank("ann", ["1"]) == asyncio.run(rank_in_event_loop())
    assert waits == [1.0, 1.0]
    assert threading.active_count() == num_threads


def test_client_rejects_async_transport():
    with pytest.raises(RuntimeError, match="pass a blocking transport"):
        run_blocking(asyncio.sleep(0))


def test_async_client_accepts_custom_transport(monkeypatch):
    monkeypatch.setitem(sys.modules, "nestrec.client.httpx_transports", None)  # a custom transport needs no httpx

    class ScriptedTransport:
        def __init__(self):
            self.requests = []
            self.sleeps = []
            self.is_closed = False
            self.outcomes = [NotSentError("refused"), EOFError("ended"), Response(503, {b"retry-after": b"3"}, b"")]

        async def send(self, request, *, timeout_s):
            self.requests.append(request)
            outcome = self.outcomes.pop(0) if self.outcomes else Response(200, {}, b'{"models":{}}')
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

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


class ScriptedServer:
    """Fake server that records requests and returns or raises prepared outcomes in order.

    Args:
        outcomes: (status, headers) of a response, or an exception.
    """

    def __init__(self, *outcomes):
        self._outcomes = list(outcomes)
        self.requests = []

    def __call__(self, request):
        self.requests.append(request)
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        status, headers = outcome
        return httpx.Response(status, headers=headers, json={"error": {"message": HTTPStatus(status).phrase}})

    def client(self, **options):
        return Client("http://server", transport=httpx.MockTransport(self), **options)


@pytest.fixture
def waits(monkeypatch):
    """Return the list of seconds that clients wait; a wait advances the clock instead of sleeping."""
    current_s = [0.0]
    seconds_waited = []

    def sleep(seconds):
        seconds_waited.append(seconds)
        current_s[0] += seconds

    monkeypatch.setattr("nestrec.client.httpx_transports.time.sleep", sleep)
    monkeypatch.setattr("nestrec.client.clients.time.monotonic", lambda: current_s[0])
    return seconds_waited


def test_client_waits_for_retry_after_within_deadline(waits):
    server = ScriptedServer((429, {"retry-after": "1"}), (503, {"retry-after": "2"}), (200, {}))
    server.client(deadline_s=4.0).rank(7, ["1"])
    assert waits == [1.0, 2.0]
    timeouts_ms = [int(request.read().partition(b'"timeout_ms":')[2].rstrip(b"}")) for request in server.requests]
    assert timeouts_ms == [4000, 3000, 1000], "each request contains the remaining time"
    assert len({request.headers["x-nestrec-user"] for request in server.requests}) == 1
    waits.clear()
    with pytest.raises(ServerBusyError) as busy:
        ScriptedServer((503, {"retry-after": "3"})).client(deadline_s=2.0).rank(7, ["1"])
    assert (busy.value.status, busy.value.retry_after_s, waits) == (503, 3.0, []), "waiting would exceed the deadline"


def test_client_retries_unreachable_server_until_deadline(waits):
    failures = [httpx.ConnectError("refused"), httpx.ReadError("reset"), httpx.RemoteProtocolError("ended")]
    ScriptedServer(*failures, (200, {})).client().recommend("a")
    assert len(waits) == 3
    assert waits[0] < waits[2]
    with pytest.raises(ServerBusyError, match="not reachable"):
        ScriptedServer(*[httpx.ConnectError("refused")] * 99).client(deadline_s=1.0).recommend("a")
    with Client(f"http://127.0.0.1:{free_port()}", deadline_s=0.05) as client, pytest.raises(ServerBusyError):
        client.models()


def test_client_events_are_retried_only_if_safe_or_allowed(waits):
    ambiguous = ((503, {"retry-after": "1"}), httpx.ReadError("reset"))  # the events may have been stored
    for outcome in ambiguous:
        server = ScriptedServer(outcome, (202, {}))
        with pytest.raises(ServerBusyError):
            server.client().events("a", HISTORY)
        server.client().events("a", HISTORY, at_least_once=True)
        server = ScriptedServer(outcome, (202, {}))
        server.client().events("a", HISTORY, at_least_once=True)
        assert len(server.requests) == 2
    for not_stored in ((429, {"retry-after": "1"}), httpx.ConnectError("refused")):
        ScriptedServer(not_stored, (202, {})).client().events("a", HISTORY)


def test_client_does_not_retry_invalid_requests(waits):
    attempts = RetryState(5.0, is_repeatable=True, now_s=lambda: 0.0)
    with pytest.raises(RequestError, match="history: is needed") as wrong:
        attempts.handle_response(400, {}, {"error": {"message": "is needed", "field": "history"}})
    assert not isinstance(wrong.value, ServerBusyError)
    with pytest.raises(RequestError, match="status 502"):
        attempts.handle_response(502, {}, None)
    assert ScriptedServer((200, {})).client(key="secret").models() is not None
    server = ScriptedServer((200, {}))
    server.client(key="secret").models()
    assert server.requests[0].headers["authorization"] == "Bearer secret"
