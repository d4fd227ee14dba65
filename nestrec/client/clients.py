"""The clients of a server: `AsyncClient` has the methods, and `Client` runs the same methods without an event loop.

Each call has one deadline for all of its attempts. Names of fields in a request are those of the server.
"""

import functools
import json
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Self, TypedDict, TypeVar, cast
from urllib.parse import quote

from nestrec.client.attempts import RetryState, ServerBusyError
from nestrec.client.client_transport import NotSentError, Transport, run_blocking
from nestrec.serving.core.http_client import Request, Response
from nestrec.serving.inputs.responses import (
    EventsResponse,
    ModelsResponse,
    PreinferResponse,
    RankResponse,
    RecommendResponse,
)

if TYPE_CHECKING:
    import httpx

_P = ParamSpec("_P")
_T = TypeVar("_T")
Id = str | int
Category = str | int | float | bool | None
Value = Category | Sequence[Category]
"""what the log has of a feature: a category, a number, a text, a list of categories, or the numbers of a vector"""
Action = int | str | Sequence[str] | None
"""a name, several names, the sum of their bits, or nothing that is known"""
Unknown = Literal["last", "score", "drop", "refuse"]
_LONGEST_MS = 10_000
"""deadline that a server takes by default"""


class UserHistory(TypedDict, total=False):
    """Events of a user, oldest first."""

    items: Sequence[Id]
    """source ids"""
    times_ms: Sequence[int]
    """Unix milliseconds of each event"""
    actions: Sequence[Action]
    """what the user did at each event"""
    features: Mapping[str, Sequence[Value]]
    """by name of a feature, a value an event"""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One request."""

    method: str
    path: str
    user: Id | None = None
    """whom it is about"""
    body: Mapping[str, Any] | None = None
    is_repeatable: bool = True
    has_deadline: bool = False
    """the server is told how long it may take"""

    def request(self, url: str, headers: Mapping[bytes, bytes], left_s: float) -> Request:
        """Return the request to a server, with the time that is left until the deadline.

        Args:
            url: Address of the server, without a slash at its end.
            headers: Headers of all requests.
            left_s: Seconds until the deadline.
        """
        all_headers = dict(headers)
        if self.user is not None:  # a front chooses the instance by this, and the id cannot be read from it
            digest = blake2b(str(self.user).encode(), digest_size=12)
            all_headers[b"x-nestrec-user"] = digest.hexdigest().encode()
        if self.body is None:
            return Request(self.method, url + self.path, all_headers)
        told = {name: value for name, value in self.body.items() if value is not None}
        if self.has_deadline:
            told["timeout_ms"] = max(1, min(_LONGEST_MS, int(1000 * left_s)))
        body = json.dumps(told, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        return Request(self.method, url + self.path, {**all_headers, b"content-type": b"application/json"}, body)


def history_of(
    history: UserHistory | None,
    items: Sequence[Id] | None,
    times_ms: Sequence[int] | None,
    actions: Sequence[Action] | None,
    features: Mapping[str, Sequence[Value]] | None,
) -> UserHistory | None:
    """Return the history that a caller gives, as one mapping or as its columns."""
    given = {"items": items, "times_ms": times_ms, "actions": actions, "features": features}
    columns = {name: values for name, values in given.items() if values is not None}
    if not columns:
        return history
    if history is not None:
        raise TypeError(f"give either history or {', '.join(columns)}, not both")
    return cast(UserHistory, columns)


def asked(path: str, user: Id, **fields: Any) -> ClientRequest:
    """Something that the server computes."""
    return ClientRequest("POST", path, user, {"user": user, **fields}, has_deadline=True)


def told(user: Id, history: UserHistory | None, *, at_least_once: bool) -> ClientRequest:
    """Events to be kept."""
    if history is None:
        raise TypeError("give the events, such as items=['12', '7'], times_ms=[1642271351894, 1642271387634]")
    return ClientRequest("POST", "/v1/events", user, {"user": user, "history": history}, is_repeatable=at_least_once)


def forgotten(user: Id, what: str) -> ClientRequest:
    """Events or prefixes of a user."""
    return ClientRequest("DELETE", f"/v1/users/{quote(str(user), safe='')}/{what}", user)


class AsyncClient:
    """Asks a server of nestrec from a program with an event loop; used inside one of them.

        async with AsyncClient("http://127.0.0.1:8000") as client: await client.recommend("ann", k=5)

    Refusals (429, 503) are asked again after the time that the server names, where the deadline allows it.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        deadline_s: float = 5.0,
        transport: "httpx.AsyncBaseTransport | Transport | None" = None,
    ):
        """Prepare a client; connections are opened by its calls.

        Args:
            url: Address of a server or a front.
            key: API key, sent as a bearer token.
            deadline_s: Deadline of calls that do not name one.
            transport: How requests are sent: by httpx over a transport of its own, or by something else.
        """
        self._url = url.rstrip("/")
        self._deadline_s = deadline_s
        self._headers = {b"authorization": f"Bearer {key}".encode()} if key else {}
        if isinstance(transport, Transport):
            self._transport = transport
        else:
            from nestrec.client.httpx_transports import AsyncHttpx

            self._transport = AsyncHttpx(transport)

    async def preinfer(
        self,
        user: Id,
        *,
        items: Sequence[Id] | None = None,
        times_ms: Sequence[int] | None = None,
        actions: Sequence[Action] | None = None,
        features: Mapping[str, Sequence[Value]] | None = None,
        history: UserHistory | None = None,
        prefer_kept: bool | None = None,
        user_features: Mapping[str, Value] | None = None,
        now_ms: int | None = None,
        unknown: Unknown | None = None,
        num_candidates: int | None = None,
        events: int | None = None,
        deadline_s: float | None = None,
    ) -> PreinferResponse:
        """Announce a ranking request of this user, so that the server can compute the history ahead.

        items, times_ms, actions and features: as in `recommend`."""
        question = asked(
            "/v1/preinfer",
            user,
            history=history_of(history, items, times_ms, actions, features),
            prefer_kept=prefer_kept,
            user_features=user_features,
            now_ms=now_ms,
            unknown=unknown,
            num_candidates=num_candidates,
            events=events,
        )
        return cast(PreinferResponse, await self._answer(question, deadline_s))

    async def rank(
        self,
        user: Id,
        candidates: Sequence[Id],
        *,
        items: Sequence[Id] | None = None,
        times_ms: Sequence[int] | None = None,
        actions: Sequence[Action] | None = None,
        features: Mapping[str, Sequence[Value]] | None = None,
        history: UserHistory | None = None,
        prefer_kept: bool | None = None,
        user_features: Mapping[str, Value] | None = None,
        context: Mapping[str, Value] | None = None,
        candidate_features: Mapping[str, Sequence[Value] | Value] | None = None,
        now_ms: int | None = None,
        unknown: Unknown | None = None,
        deadline_s: float | None = None,
    ) -> RankResponse:
        """Return scores of candidates, in their order.

        items, times_ms, actions and features: as in `recommend`."""
        question = asked(
            "/v1/rank",
            user,
            candidates=candidates,
            history=history_of(history, items, times_ms, actions, features),
            prefer_kept=prefer_kept,
            user_features=user_features,
            context=context,
            candidate_features=candidate_features,
            now_ms=now_ms,
            unknown=unknown,
        )
        return cast(RankResponse, await self._answer(question, deadline_s))

    async def recommend(
        self,
        user: Id,
        *,
        items: Sequence[Id] | None = None,
        times_ms: Sequence[int] | None = None,
        actions: Sequence[Action] | None = None,
        features: Mapping[str, Sequence[Value]] | None = None,
        history: UserHistory | None = None,
        prefer_kept: bool | None = None,
        k: int | None = None,
        exclude_seen: bool | None = None,
        exclude: Sequence[Id] | None = None,
        allow: Sequence[Id] | None = None,
        user_features: Mapping[str, Value] | None = None,
        context: Mapping[str, Value] | None = None,
        candidate_features: Mapping[str, Value] | None = None,
        now_ms: int | None = None,
        unknown: Unknown | None = None,
        deadline_s: float | None = None,
    ) -> RecommendResponse:
        """Return the best items of the catalog, best first.

        items, times_ms, actions and features: the user's history, oldest event first, with one value per event;
        `history` takes the same as one mapping. Without a history the server takes the events that it keeps."""
        question = asked(
            "/v1/recommend",
            user,
            history=history_of(history, items, times_ms, actions, features),
            prefer_kept=prefer_kept,
            k=k,
            exclude_seen=exclude_seen,
            exclude=exclude,
            allow=allow,
            user_features=user_features,
            context=context,
            candidate_features=candidate_features,
            now_ms=now_ms,
            unknown=unknown,
        )
        return cast(RecommendResponse, await self._answer(question, deadline_s))

    async def events(
        self,
        user: Id,
        history: UserHistory | None = None,
        *,
        items: Sequence[Id] | None = None,
        times_ms: Sequence[int] | None = None,
        actions: Sequence[Action] | None = None,
        features: Mapping[str, Sequence[Value]] | None = None,
        at_least_once: bool = False,
        deadline_s: float | None = None,
    ) -> EventsResponse:
        """Events for the server to keep. at_least_once: also sent again where nobody knows whether they were kept, in
        which case they may be there twice; else that is an error."""
        given = history_of(history, items, times_ms, actions, features)
        return cast(EventsResponse, await self._answer(told(user, given, at_least_once=at_least_once), deadline_s))

    async def forget_events(self, id: Id, *, deadline_s: float | None = None) -> None:
        """Erase the events that are kept of a user, everywhere."""
        await self._answer(forgotten(id, "events"), deadline_s)

    async def forget_cache(self, id: Id, *, deadline_s: float | None = None) -> None:
        """Drop the prefixes that were computed for a user, everywhere."""
        await self._answer(forgotten(id, "cache"), deadline_s)

    async def models(self, *, deadline_s: float | None = None) -> ModelsResponse:
        """What the models read and give."""
        return cast(ModelsResponse, await self._answer(ClientRequest("GET", "/v1/models"), deadline_s))

    async def aclose(self) -> None:
        """End the connections that are kept."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _answer(self, question: ClientRequest, deadline_s: float | None) -> Any:
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        attempts = RetryState(deadline_s, is_repeatable=question.is_repeatable, now_s=time.monotonic)
        while True:
            left_s = attempts.left_s()
            request = question.request(self._url, self._headers, left_s)
            try:
                response = await self._transport.send(request, timeout_s=left_s)
            except TimeoutError as error:
                raise ServerBusyError("the deadline has passed") from error
            except (OSError, EOFError) as error:
                wait_s = attempts.failed(error, was_sent=not isinstance(error, NotSentError))
            else:
                body = _read(response)
                wait = attempts.answered(response.status, response.headers, body)
                if wait is None:
                    return body
                wait_s = wait
            await self._transport.sleep(wait_s)


def _blocking(
    method: Callable[Concatenate[AsyncClient, _P], Coroutine[Any, Any, _T]],
) -> "Callable[Concatenate[Client, _P], _T]":
    """Return the method of `Client` that does the same as this one of `AsyncClient`."""

    @functools.wraps(method)
    def call(self: "Client", /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return run_blocking(method(self._client, *args, **kwargs))

    call.__qualname__ = f"Client.{method.__name__}"
    return call


class Client:
    """Asks a server of nestrec; safe to share between threads.

        with Client("http://127.0.0.1:8000") as client: client.recommend("ann", k=5)

    Refusals (429, 503) are asked again after the time that the server names, where the deadline allows it.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        deadline_s: float = 5.0,
        transport: "httpx.BaseTransport | None" = None,
    ):
        """Prepare a client; connections are opened by its calls.

        Args:
            url: Address of a server or a front.
            key: API key, sent as a bearer token.
            deadline_s: Deadline of calls that do not name one.
            transport: Transport of httpx over which requests are sent.
        """
        from nestrec.client.httpx_transports import BlockingHttpx

        self._client = AsyncClient(url, key=key, deadline_s=deadline_s, transport=BlockingHttpx(transport))

    preinfer = _blocking(AsyncClient.preinfer)
    rank = _blocking(AsyncClient.rank)
    recommend = _blocking(AsyncClient.recommend)
    events = _blocking(AsyncClient.events)
    forget_events = _blocking(AsyncClient.forget_events)
    forget_cache = _blocking(AsyncClient.forget_cache)
    models = _blocking(AsyncClient.models)

    def close(self) -> None:
        """End the connections that are kept."""
        run_blocking(self._client.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read(response: Response) -> Any:
    try:
        return json.loads(response.body) if response.body else None
    except ValueError:
        return None
