"""HTTP clients of a nestrec server: `AsyncClient` for asyncio, and `Client`, which is blocking.

Each call has one deadline for all of its attempts (see `nestrec.client.attempts` for the retry policy). Request fields
have the names of the HTTP API.
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
"""Raw value of a feature as in the event log: a category, a number, text, a list of categories, or a vector."""
Action = int | str | Sequence[str] | None
"""Actions of one event: a name, several names, a bit mask, or None if the actions are unknown."""
Unknown = Literal["last", "score", "drop", "reject"]
_MAX_TIMEOUT_MS = 10_000
"""Largest `timeout_ms` that a server accepts by default."""


class UserHistory(TypedDict, total=False):
    """Events of a user as columns with one value per event, oldest event first."""

    items: Sequence[Id]
    """Source ids of the items."""
    times_ms: Sequence[int]
    """Times of the events in Unix milliseconds."""
    actions: Sequence[Action]
    """Actions of the user."""
    features: Mapping[str, Sequence[Value]]
    """Event features: a column of values per feature name."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One call of the HTTP API, independent of the server's address and of the attempt."""

    method: str
    path: str
    user: Id | None = None
    """User id to which the request refers; None for requests that refer to no user."""
    body: Mapping[str, Any] | None = None
    """JSON fields of the request; fields that are None are omitted."""
    is_repeatable: bool = True
    """Whether the request is idempotent or may be processed twice."""
    has_deadline: bool = False
    """Whether the request contains the remaining time as `timeout_ms`."""

    def to_http_request(self, url: str, headers: Mapping[bytes, bytes], remaining_s: float) -> Request:
        """Build the HTTP request of one attempt.

        Args:
            url: Base URL of the server, without a trailing slash.
            headers: Headers of all requests.
            remaining_s: Seconds until the deadline.
        """
        all_headers = dict(headers)
        if self.user is not None:  # load balancers route by this header; a digest does not reveal the id
            digest = blake2b(str(self.user).encode(), digest_size=12)
            all_headers[b"x-nestrec-user"] = digest.hexdigest().encode()
        if self.body is None:
            return Request(self.method, url + self.path, all_headers)
        fields = {name: value for name, value in self.body.items() if value is not None}
        if self.has_deadline:
            fields["timeout_ms"] = max(1, min(_MAX_TIMEOUT_MS, int(1000 * remaining_s)))
        body = json.dumps(fields, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        return Request(self.method, url + self.path, {**all_headers, b"content-type": b"application/json"}, body)


def history_of(
    history: UserHistory | None,
    items: Sequence[Id] | None,
    times_ms: Sequence[int] | None,
    actions: Sequence[Action] | None,
    features: Mapping[str, Sequence[Value]] | None,
) -> UserHistory | None:
    """Return the history of a call, which is passed either as one mapping or as columns.

    Raises:
        TypeError: The caller passed both.
    """
    arguments = {"items": items, "times_ms": times_ms, "actions": actions, "features": features}
    columns = {name: values for name, values in arguments.items() if values is not None}
    if not columns:
        return history
    if history is not None:
        raise TypeError(f"pass either history or {', '.join(columns)}, not both")
    return cast(UserHistory, columns)


def compute_request(path: str, user: Id, **fields: Any) -> ClientRequest:
    """Return a request whose response the server computes: it is idempotent and contains the remaining time."""
    return ClientRequest("POST", path, user, {"user": user, **fields}, has_deadline=True)


def events_request(user: Id, history: UserHistory | None, *, at_least_once: bool) -> ClientRequest:
    """Return a request that appends events to the stored history of a user; idempotent only if `at_least_once`."""
    if history is None:
        raise TypeError("events are missing: pass items=['12', '7'] and times_ms=[1642271351894, 1642271387634]")
    return ClientRequest("POST", "/v1/events", user, {"user": user, "history": history}, is_repeatable=at_least_once)


def delete_request(user: Id, resource: str) -> ClientRequest:
    """Return a request that deletes the `events` or the `cache` of a user."""
    return ClientRequest("DELETE", f"/v1/users/{quote(str(user), safe='')}/{resource}", user)


class AsyncClient:
    """Asyncio HTTP client of a nestrec server. Not thread-safe: use a client inside one event loop.

    Each call has one deadline. If the server rejects a request because of load (429, 503) or is not reachable, the
    client retries it until the deadline: after the server's Retry-After, or with exponential backoff. Requests that are
    not idempotent (`events` without `at_least_once`) are retried only if the server cannot have processed them.

    All methods raise `RequestError` if the server rejects the request or fails, and its subclass `ServerBusyError` if
    the request did not succeed before the deadline.

    Example:
        >>> async with AsyncClient("http://127.0.0.1:8000") as client:
        ...     response = await client.recommend("ann", items=["12", "7"], times_ms=[1642271351894, 1642271387634])
        ...     print(response["items"])
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        deadline_s: float = 5.0,
        transport: "httpx.AsyncBaseTransport | Transport | None" = None,
    ):
        """Create a client; connections are opened by the first calls.

        Args:
            url: Base URL of a server or a load balancer, for example `http://127.0.0.1:8000`.
            key: API key, sent as a bearer token; None if the server needs no key.
            deadline_s: Default deadline of a call in seconds, including all retries.
            transport: Transport of httpx, or an own `Transport`; None uses the default transport of httpx.
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
        prefer_stored_history: bool | None = None,
        user_features: Mapping[str, Value] | None = None,
        now_ms: int | None = None,
        on_unknown: Unknown | None = None,
        num_candidates: int | None = None,
        num_events: int | None = None,
        deadline_s: float | None = None,
    ) -> PreinferResponse:
        """Announce a ranking request of a user, so that the server can prefill the history ahead of it (pre-infer).

        Args:
            user: User id.
            items: Source ids of the history's items, oldest event first.
            times_ms: Times of the events in Unix milliseconds.
            actions: Actions of the events.
            features: Event features: a column of values per feature name.
            history: The same columns as one mapping, instead of `items`, `times_ms`, `actions` and `features`. If the
                request contains no history, the server uses the stored events.
            prefer_stored_history: Whether to prefer the stored events to the history of the request, which is then the
                fallback if the store has no events or is unavailable.
            user_features: Raw values of user features by name.
            now_ms: Time of the ranking request in Unix milliseconds; default: the time of the server.
            on_unknown: Handling of ids that the model does not know.
            num_candidates: Expected number of candidates of the ranking request.
            num_events: Number of events in the history, sent instead of the history; the response reports whether the
                server needs it.
            deadline_s: Deadline of the call in seconds, including all retries; None uses that of the client.

        Returns:
            Decision of the server: whether it prefills the history, and the reason.

        Raises:
            RequestError: The server rejected the request.
            ServerBusyError: The request did not succeed before the deadline.
        """
        request = compute_request(
            "/v1/preinfer",
            user,
            history=history_of(history, items, times_ms, actions, features),
            prefer_stored_history=prefer_stored_history,
            user_features=user_features,
            now_ms=now_ms,
            on_unknown=on_unknown,
            num_candidates=num_candidates,
            num_events=num_events,
        )
        return cast(PreinferResponse, await self._call(request, deadline_s))

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
        prefer_stored_history: bool | None = None,
        user_features: Mapping[str, Value] | None = None,
        context: Mapping[str, Value] | None = None,
        candidate_features: Mapping[str, Sequence[Value] | Value] | None = None,
        now_ms: int | None = None,
        on_unknown: Unknown | None = None,
        deadline_s: float | None = None,
    ) -> RankResponse:
        """Score candidate items for a user.

        Args:
            user: User id.
            candidates: Source ids of the items to score.
            items: Source ids of the history's items, oldest event first.
            times_ms: Times of the events in Unix milliseconds.
            actions: Actions of the events.
            features: Event features: a column of values per feature name.
            history: The same columns as one mapping, instead of `items`, `times_ms`, `actions` and `features`. If the
                request contains no history, the server uses the stored events.
            prefer_stored_history: Whether to prefer the stored events to the history of the request, which is then the
                fallback if the store has no events or is unavailable.
            user_features: Raw values of user features by name.
            context: Raw values of context features of the request by name.
            candidate_features: Event features of the candidates by name: one value per candidate, or one value for all.
            now_ms: Time of the request in Unix milliseconds; default: the time of the server.
            on_unknown: Handling of candidates that the model does not know: rank them last (default), score them, drop
                them, or reject the request.
            deadline_s: Deadline of the call in seconds, including all retries; None uses that of the client.

        Returns:
            Scores by output of the model, one per candidate in the order of `candidates`; larger is better.

        Raises:
            RequestError: The server rejected the request.
            ServerBusyError: The request did not succeed before the deadline.
        """
        request = compute_request(
            "/v1/rank",
            user,
            candidates=candidates,
            history=history_of(history, items, times_ms, actions, features),
            prefer_stored_history=prefer_stored_history,
            user_features=user_features,
            context=context,
            candidate_features=candidate_features,
            now_ms=now_ms,
            on_unknown=on_unknown,
        )
        return cast(RankResponse, await self._call(request, deadline_s))

    async def recommend(
        self,
        user: Id,
        *,
        items: Sequence[Id] | None = None,
        times_ms: Sequence[int] | None = None,
        actions: Sequence[Action] | None = None,
        features: Mapping[str, Sequence[Value]] | None = None,
        history: UserHistory | None = None,
        prefer_stored_history: bool | None = None,
        k: int | None = None,
        exclude_seen: bool | None = None,
        exclude: Sequence[Id] | None = None,
        allow: Sequence[Id] | None = None,
        user_features: Mapping[str, Value] | None = None,
        context: Mapping[str, Value] | None = None,
        candidate_features: Mapping[str, Value] | None = None,
        now_ms: int | None = None,
        on_unknown: Unknown | None = None,
        deadline_s: float | None = None,
    ) -> RecommendResponse:
        """Return the best items of the catalog for a user.

        Args:
            user: User id.
            items: Source ids of the history's items, oldest event first.
            times_ms: Times of the events in Unix milliseconds.
            actions: Actions of the events.
            features: Event features: a column of values per feature name.
            history: The same columns as one mapping, instead of `items`, `times_ms`, `actions` and `features`. If the
                request contains no history, the server uses the stored events.
            prefer_stored_history: Whether to prefer the stored events to the history of the request, which is then the
                fallback if the store has no events or is unavailable.
            k: Number of items to return; default: 10.
            exclude_seen: Whether items of the history are excluded; default: True.
            exclude: Source ids of items to exclude.
            allow: Source ids of the only items that can be returned; None allows the whole catalog.
            user_features: Raw values of user features by name.
            context: Raw values of context features of the request by name.
            candidate_features: Event features by name, with one value for all candidates.
            now_ms: Time of the request in Unix milliseconds; default: the time of the server.
            on_unknown: Handling of ids that the model does not know.
            deadline_s: Deadline of the call in seconds, including all retries; None uses that of the client.

        Returns:
            Source ids of the items, best first, and their scores by output of the model.

        Raises:
            RequestError: The server rejected the request.
            ServerBusyError: The request did not succeed before the deadline.
        """
        request = compute_request(
            "/v1/recommend",
            user,
            history=history_of(history, items, times_ms, actions, features),
            prefer_stored_history=prefer_stored_history,
            k=k,
            exclude_seen=exclude_seen,
            exclude=exclude,
            allow=allow,
            user_features=user_features,
            context=context,
            candidate_features=candidate_features,
            now_ms=now_ms,
            on_unknown=on_unknown,
        )
        return cast(RecommendResponse, await self._call(request, deadline_s))

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
        """Append events to the history of a user that the server stores.

        Args:
            user: User id.
            history: Events as one mapping, instead of `items`, `times_ms`, `actions` and `features`.
            items: Source ids of the events' items, oldest event first.
            times_ms: Times of the events in Unix milliseconds.
            actions: Actions of the events.
            features: Event features: a column of values per feature name.
            at_least_once: Whether to retry if an attempt may have been processed: the events may then be stored twice.
                By default that case raises `ServerBusyError`.
            deadline_s: Deadline of the call in seconds, including all retries; None uses that of the client.

        Raises:
            RequestError: The server rejected the events.
            ServerBusyError: The request did not succeed before the deadline, or it is not known whether it did.
        """
        columns = history_of(history, items, times_ms, actions, features)
        return cast(
            EventsResponse, await self._call(events_request(user, columns, at_least_once=at_least_once), deadline_s)
        )

    async def forget_events(self, id: Id, *, deadline_s: float | None = None) -> None:
        """Delete the stored events of a user on all instances."""
        await self._call(delete_request(id, "events"), deadline_s)

    async def forget_cache(self, id: Id, *, deadline_s: float | None = None) -> None:
        """Evict the cached keys and values of a user from the prefix caches of all instances."""
        await self._call(delete_request(id, "cache"), deadline_s)

    async def models(self, *, deadline_s: float | None = None) -> ModelsResponse:
        """Return the inputs and outputs of the models in service."""
        return cast(ModelsResponse, await self._call(ClientRequest("GET", "/v1/models"), deadline_s))

    async def aclose(self) -> None:
        """Close the connections of the client."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _call(self, request: ClientRequest, deadline_s: float | None) -> Any:
        """Send a request until it succeeds and return the decoded JSON body of the response."""
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        retries = RetryState(deadline_s, is_repeatable=request.is_repeatable, now_s=time.monotonic)
        while True:
            remaining_s = retries.remaining_s()
            http_request = request.to_http_request(self._url, self._headers, remaining_s)
            try:
                response = await self._transport.send(http_request, timeout_s=remaining_s)
            except TimeoutError as error:
                raise ServerBusyError("the deadline has passed") from error
            except (OSError, EOFError) as error:
                wait_s = retries.handle_error(error, was_sent=not isinstance(error, NotSentError))
            else:
                body = _decode_body(response)
                delay_s = retries.handle_response(response.status, response.headers, body)
                if delay_s is None:
                    return body
                wait_s = delay_s
            await self._transport.sleep(wait_s)


def _blocking(
    method: Callable[Concatenate[AsyncClient, _P], Coroutine[Any, Any, _T]],
) -> "Callable[Concatenate[Client, _P], _T]":
    """Return the blocking method of `Client` for a method of `AsyncClient`."""

    @functools.wraps(method)
    def call(self: "Client", /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return run_blocking(method(self._client, *args, **kwargs))

    call.__qualname__ = f"Client.{method.__name__}"
    return call


class Client:
    """HTTP client of a nestrec server. Thread-safe: threads can share a client.

    The methods are those of `AsyncClient`, but block until the response has arrived. Each call has one deadline. If the
    server rejects a request because of load (429, 503) or is not reachable, the client retries it until the deadline.

    All methods raise `RequestError` if the server rejects the request or fails, and its subclass `ServerBusyError` if
    the request did not succeed before the deadline.

    Example:
        >>> with Client("http://127.0.0.1:8000") as client:
        ...     response = client.recommend("ann", items=["12", "7"], times_ms=[1642271351894, 1642271387634])
        ...     print(response["items"])
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        deadline_s: float = 5.0,
        transport: "httpx.BaseTransport | None" = None,
    ):
        """Create a client; connections are opened by the first calls.

        Args:
            url: Base URL of a server or a load balancer, for example `http://127.0.0.1:8000`.
            key: API key, sent as a bearer token; None if the server needs no key.
            deadline_s: Default deadline of a call in seconds, including all retries.
            transport: Transport of httpx; None uses the default one.
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
        """Close the connections of the client."""
        run_blocking(self._client.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _decode_body(response: Response) -> Any:
    try:
        return json.loads(response.body) if response.body else None
    except ValueError:
        return None
