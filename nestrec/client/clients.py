"""The clients: the same methods, one with `await`. Each call has one deadline, for all of its attempts.

What is asked: method, path, body and headers of each request. Names of fields are those of the server.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, cast
from urllib.parse import quote

import httpx

from nestrec.client.attempts import RetryState, ServerBusyError
from nestrec.serving.inputs.responses import (
    EventsResponse,
    ModelsResponse,
    PreinferResponse,
    RankResponse,
    RecommendResponse,
)

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

    def content(self, left_s: float) -> dict[str, Any] | None:
        """The body, with what is left until the deadline."""
        if self.body is None:
            return None
        told = {name: value for name, value in self.body.items() if value is not None}
        if self.has_deadline:
            told["timeout_ms"] = max(1, min(_LONGEST_MS, int(1000 * left_s)))
        return told

    def headers(self) -> dict[str, str]:
        """A front sends all requests of a user to one instance by this; nobody can read the id from it."""
        if self.user is None:
            return {}
        return {"x-nestrec-user": blake2b(str(self.user).encode(), digest_size=12).hexdigest()}


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


class Client:
    """Asks a server of nestrec; safe to share between threads.

        with Client("http://127.0.0.1:8000") as client: client.recommend("ann", k=5)

    Refusals (429, 503) are asked again after the time that the server names, where the deadline allows it.
    """

    def __init__(
        self, url: str, *, key: str | None = None, deadline_s: float = 5.0, transport: httpx.BaseTransport | None = None
    ):
        """url: of a server or a front. key: sent as a bearer token. deadline_s: of a call that names none."""
        self._deadline_s = deadline_s
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=url, headers=headers, transport=transport)

    def preinfer(
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
        return cast(PreinferResponse, self._answer(question, deadline_s))

    def rank(
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
        return cast(RankResponse, self._answer(question, deadline_s))

    def recommend(
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
        return cast(RecommendResponse, self._answer(question, deadline_s))

    def events(
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
        return cast(EventsResponse, self._answer(told(user, given, at_least_once=at_least_once), deadline_s))

    def forget_events(self, id: Id, *, deadline_s: float | None = None) -> None:
        """Erase the events that are kept of a user, everywhere."""
        self._answer(forgotten(id, "events"), deadline_s)

    def forget_cache(self, id: Id, *, deadline_s: float | None = None) -> None:
        """Drop the prefixes that were computed for a user, everywhere."""
        self._answer(forgotten(id, "cache"), deadline_s)

    def models(self, *, deadline_s: float | None = None) -> ModelsResponse:
        """What the models read and give."""
        return cast(ModelsResponse, self._answer(ClientRequest("GET", "/v1/models"), deadline_s))

    def close(self) -> None:
        """End the connections that are kept."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, question: ClientRequest, deadline_s: float | None) -> Any:
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        attempts = RetryState(deadline_s, is_repeatable=question.is_repeatable, now_s=time.monotonic)
        while True:
            left_s = attempts.left_s()
            try:
                response = self._http.request(
                    question.method,
                    question.path,
                    json=question.content(left_s),
                    headers=question.headers(),
                    timeout=left_s,
                )
            except httpx.TimeoutException as error:
                raise ServerBusyError("the deadline has passed") from error
            except httpx.TransportError as error:
                wait_s = attempts.failed(error, was_sent=not isinstance(error, httpx.ConnectError))
            else:
                body = _read(response)
                wait = attempts.answered(response.status_code, response.headers, body)
                if wait is None:
                    return body
                wait_s = wait
            time.sleep(wait_s)


class AsyncClient:
    """The same for programs with an event loop; used inside one of them.

        async with AsyncClient("http://127.0.0.1:8000") as client: await client.recommend("ann", k=5)

    Refusals (429, 503) are asked again after the time that the server names, where the deadline allows it.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        deadline_s: float = 5.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ):
        """url: of a server or a front. key: sent as a bearer token. deadline_s: of a call that names none."""
        self._deadline_s = deadline_s
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.AsyncClient(base_url=url, headers=headers, transport=transport)

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
        await self._http.aclose()

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
            try:
                response = await self._http.request(
                    question.method,
                    question.path,
                    json=question.content(left_s),
                    headers=question.headers(),
                    timeout=left_s,
                )
            except httpx.TimeoutException as error:
                raise ServerBusyError("the deadline has passed") from error
            except httpx.TransportError as error:
                wait_s = attempts.failed(error, was_sent=not isinstance(error, httpx.ConnectError))
            else:
                body = _read(response)
                wait = attempts.answered(response.status_code, response.headers, body)
                if wait is None:
                    return body
                wait_s = wait
            await asyncio.sleep(wait_s)


def _read(response: httpx.Response) -> Any:
    try:
        return response.json() if response.content else None
    except ValueError:
        return None
