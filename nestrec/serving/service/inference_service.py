"""What the front talks to: instances of an engine behind a router, the cascade over them, and the swap of models."""

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.clock import Clock, RealClock
from nestrec.base.config import config
from nestrec.base.config_values import Count, NonNegative
from nestrec.base.errors import UserError, require
from nestrec.serving.core import tracing
from nestrec.serving.core.rejections import OverloadedError, UnavailableError
from nestrec.serving.core.request_limits import RequestSource, current_sender
from nestrec.serving.core.slot_router import KeyedHash, Ring, Router
from nestrec.serving.engine.batch_scheduler import EngineConfig
from nestrec.serving.engine.serving_engine import Engine
from nestrec.serving.inputs.engine_request import EngineRequest, RankResult
from nestrec.serving.kv_cache.preinfer_trigger import Decision
from nestrec.serving.model.model_adapter import make_form
from nestrec.serving.model.request_inputs import Candidates, History
from nestrec.serving.model.servable import Servable, check_sound
from nestrec.serving.model.servable_spec import shown_version
from nestrec.serving.model.served_tables import TablesConfig
from nestrec.serving.versions.live_version import LiveModelVersion, open_source, source_of
from nestrec.serving.versions.version_store import READ_TIMEOUT_S

Ids = NDArray[np.int64]
_POLL_S = 0.01


class ModelSwappedError(Exception):
    """The model was swapped before the request reached it: begin again with the new one."""


@config
class ServiceConfig:
    engine: EngineConfig = EngineConfig()
    """of each instance"""
    instances: Count = 1
    """engines of each model, each with a thread and a cache of its own"""
    slide_events: Count | None = None
    """events by which a full history slides; none: as many as the model was measured with (task.history.slide_events,
    task.inputs.slide_events), so that responses equal the evaluation"""
    preranked: Count = 256
    """items that retrieval hands to ranking, where both models are served"""
    drain_s: NonNegative = 30.0
    """how long accepted work may take when the service stops or swaps a model"""
    session_s: NonNegative = 2.0
    """how long after /v1/preinfer a ranking request is answered by the same version, though another has taken over"""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ModelDeployment:
    """The engines of one version of one model. Whatever a request needs of the model it takes from one fleet."""

    servable: Servable
    engines: tuple[Engine, ...]
    loaded_at_s: float = field(default_factory=time.time)
    """Unix seconds"""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of a candidate's scores."""
        return self.engines[0].form.outputs

    def close(self, drain_s: float) -> None:
        for engine in self.engines:
            engine.drain(drain_s)
        for engine in self.engines:
            engine.close()


@dataclass(slots=True)
class Reloads:
    """How often models were asked to be loaded anew, and what became of it."""

    asked: int = 0
    done: int = 0
    """requests that have been seen to: equal to `asked` where nothing is under way"""
    is_refused: bool = False
    """the last one left a model as it was; the log says why"""


class Service:
    """Thread safe. `models` gives one retrieval model, one ranking model, or both."""

    def __init__(
        self,
        models: Mapping[str, Servable],
        cfg: ServiceConfig,
        clock: Clock | None = None,
        on_engine_lost: Callable[[], None] = lambda: None,
    ):
        """on_engine_lost: called on the thread of an engine that cannot continue."""
        self.cfg = cfg
        self._clock = clock or RealClock()
        self._keyed = KeyedHash()
        self._on_engine_lost = on_engine_lost
        self._lock = threading.Lock()
        self.sources: dict[str, str] = {}
        """folder or address of each model that was loaded, by its role"""
        self.followed: dict[str, LiveModelVersion] = {}
        """by role: models that came from an address of versions, as they were loaded"""
        self._changing = threading.Lock()
        self.adding = threading.Lock()
        """held by whoever adds items"""
        self.reloads = Reloads()
        self.is_draining = False
        """whoever routes requests is told that this one is not ready; those that come all the same are served"""
        self._back_s = 0.0
        self._expected: OrderedDict[str, tuple[ModelDeployment, float]] = OrderedDict()
        self.fleets = {role: self._fleet(servable) for role, servable in models.items()}
        ring = Ring.make(cfg.instances, self._keyed)
        self.router = Router(ring, self._keyed, self._clock)

    @staticmethod
    def load(
        models: Sequence[Path | str],
        cfg: ServiceConfig,
        device: torch.device | str = "cpu",
        tables: TablesConfig | None = None,
        *,
        on_engine_lost: Callable[[], None] = lambda: None,
        read_timeout_s: float = READ_TIMEOUT_S,
    ) -> "Service":
        """models: folders that `nestrec export` wrote, or addresses of versions. on_engine_lost: see `Service`.
        read_timeout_s: of a file of a version."""
        servables: dict[str, Servable] = {}
        sources: dict[str, str] = {}
        followed: dict[str, LiveModelVersion] = {}
        for text in map(str, models):
            source = source_of(text)
            found = None if source is None else open_source(source, device, tables, read_timeout_s=read_timeout_s)
            servable = Servable.load(Path(text), device, tables) if found is None else found.servable
            role = role_of(servable)
            require(role not in servables, f"is a second {role} model", option="MODEL", value=text, remedy="give one")
            servables[role] = servable
            sources[role] = text
            if found is not None:
                followed[role] = found
        service = Service(servables, cfg, on_engine_lost=on_engine_lost)
        service.sources = sources
        service.followed = followed
        return service

    def fleet(self, role: str) -> ModelDeployment:
        """The engines in service now; work that began on older ones ends there."""
        return self.fleets[role]

    def announced_fleet(self, user: str) -> ModelDeployment:
        """The engines that are told of a ranking request of this user to come, which then belongs to them for a while.
        Chosen and remembered at once: a swap comes before or after it."""
        with self._lock:
            fleet = self.fleets[self.ranker]
            now_s = self._clock.now_s()
            self._expected.pop(user, None)
            while self._expected and next(iter(self._expected.values()))[1] <= now_s:
                self._expected.popitem(last=False)
            self._expected[user] = (fleet, now_s + self.cfg.session_s)
            return fleet

    def ranking_fleet(self, user: str) -> ModelDeployment:
        """The engines for a ranking request of this user: those that were told of it, though newer ones may have taken
        over meanwhile."""
        with self._lock:
            fleet, until_s = self._expected.get(user, (None, 0.0))
        return fleet if fleet is not None and until_s > self._clock.now_s() else self.fleets[self.ranker]

    def _came(self, user: str) -> None:
        """Who was expected has come; whoever served the user, newer engines do from now on."""
        with self._lock:
            self._expected.pop(user, None)

    @property
    def ranker(self) -> str:
        """The model that ranks candidates: the ranking model where there is one."""
        return "ranking" if "ranking" in self.fleets else "retrieval"

    def refusal(self, role: str, sender: RequestSource) -> OverloadedError | None:
        """For a request that nobody has looked into yet, where no instance has room for one of its bytes."""
        return self.fleets[role].engines[0].refuse() if self.is_full(self.fleets[role], sender) else None

    @staticmethod
    def is_full(fleet: ModelDeployment, sender: RequestSource) -> bool:
        """No instance has room for a request of this sender, whatever is in it."""
        return all(engine.is_full_for(sender) for engine in fleet.engines)

    async def rank(
        self, fleet: ModelDeployment, user: str, history: History, candidates: Candidates, *, timeout_s: float
    ) -> RankResult:
        """Scores of candidates by the user's instance; another one, with full inference, where that has died."""
        sender = replace(current_sender.get(), back_s=self._back_s)
        slot, work = self.begin_rank(fleet, user, history, candidates, timeout_s=timeout_s, sender=sender)
        try:
            answer = await _result(work, timeout_s)
            self._back_s = time.perf_counter() - work.ended_s
            self.check_names(fleet, answer)
            tracing.note_engine(
                work.times(),
                prefix_source=answer.source,
                num_cached=answer.num_cached,
                model_version=shown_version(answer.version),
                num_candidates=len(candidates),
            )
            return answer
        finally:
            self.end_rank(slot)

    def begin_rank(
        self,
        fleet: ModelDeployment,
        user: str,
        history: History,
        candidates: Candidates,
        *,
        timeout_s: float,
        sender: RequestSource,
    ) -> tuple[int, EngineRequest]:
        """A request in the queue of the user's instance, and the slot of that until `end_rank`."""
        slot = self._begin(user)
        try:
            work = fleet.engines[slot].rank(user, history, candidates, timeout_s=timeout_s, sender=sender)
        except BaseException as error:
            self.end_rank(slot)
            if isinstance(error, UnavailableError):
                self._came(user)
                if fleet not in self.fleets.values():
                    raise ModelSwappedError from None
            raise
        self._came(user)
        return slot, work

    def end_rank(self, slot: int) -> None:
        with self._lock:
            self.router.end(slot)

    def check_names(self, fleet: ModelDeployment, answer: RankResult) -> None:
        """`ModelSwappedError` where an answer is by a later version, with other names than those that it was read
        with."""
        if answer.version != fleet.servable.version and self._has_grown_since(fleet):
            raise ModelSwappedError

    def _has_grown_since(self, fleet: ModelDeployment) -> bool:
        """Whether a request that was read with the names of this fleet's model may mean something else by now."""
        old = fleet.servable
        now = [other.servable for other in self.fleets.values() if other.engines == fleet.engines]
        return not now or now[0].item_keys is not old.item_keys or now[0].spec.columns is not old.spec.columns

    async def preinfer(
        self, fleet: ModelDeployment, user: str, history: History, now_ms: int, num_candidates: int, *, timeout_s: float
    ) -> Decision:
        """Tell the user's instance that a ranking request is on its way."""
        sender = current_sender.get()
        return self.signal(fleet, user, history, now_ms, num_candidates, timeout_s=timeout_s, sender=sender)

    def signal(
        self,
        fleet: ModelDeployment,
        user: str,
        history: History,
        now_ms: int,
        num_candidates: int,
        *,
        timeout_s: float,
        sender: RequestSource,
    ) -> Decision:
        """The same, of a sender that is named."""
        slot = self._begin(user)
        try:
            engine = fleet.engines[slot]
            return engine.preinfer(user, history, now_ms, num_candidates, timeout_s=timeout_s, sender=sender)[0]
        except UnavailableError:
            if fleet not in self.fleets.values():
                raise ModelSwappedError from None
            raise
        finally:
            self.end_rank(slot)

    async def foresee(self, user: str, num_events: int, num_candidates: int) -> tuple[ModelDeployment, Decision]:
        """Whether a signal of a user with so many events would be of use to the instance that would get it."""
        fleet = self.fleets[self.ranker]
        slot = self._begin(user)
        try:
            return fleet, fleet.engines[slot].foresee(num_events, num_candidates)
        finally:
            self.end_rank(slot)

    def signals_from(self, num_candidates: int) -> int:
        """Events of the shortest history whose signal would be of use to some instance now."""
        return min(engine.signals_from(num_candidates) for engine in self.fleets[self.ranker].engines)

    def forget(self, user: str) -> None:
        """Drop a user's prefixes on every instance."""
        for fleet in self.fleets.values():
            for engine in fleet.engines:
                engine.forget(user)

    def swap(self, *servables: Servable) -> None:
        """Serve other versions of models from now on, all at once and warmed up; requests under way, and those that
        were announced, end with the one they began with."""
        for servable in servables:
            if role_of(servable) not in self.fleets:
                remedy = f"serve a {' or '.join(self.fleets)} model, or start a server of both"
                raise UserError("has no older version here", option="model", value=role_of(servable), remedy=remedy)
        with self._changing:
            self._swap(servables)

    def _swap(self, servables: Sequence[Servable]) -> None:
        fresh: dict[str, ModelDeployment] = {}
        with contextlib.ExitStack() as made:
            for servable in servables:
                fresh[role_of(servable)] = fleet = self._fleet(servable)
                made.callback(fleet.close, 0.0)
            made.pop_all()
        with self._lock:
            old = [self.fleets[role] for role in fresh]
            self.fleets = {**self.fleets, **fresh}
        self._wait_for_sessions(old)
        for fleet in old:
            fleet.close(self.cfg.drain_s)

    def advance(self, role: str, servable: Servable, change: Callable[[], None]) -> None:
        """Serve a later version of a model out of the same memory: `change` makes it that, or raises and leaves it.

        All engines of the model stand still between two batches meanwhile. Works that they have begun begin again: no
        answer is computed by two versions.
        """
        with self._changing:
            fleet = self.fleets[role]
            engines = [engine for engine in fleet.engines if engine.is_alive]

            def switch() -> None:
                change()
                for engine in fleet.engines:
                    engine.form.follow(servable)
                with self._lock:
                    self.fleets = {**self.fleets, role: ModelDeployment(servable, fleet.engines)}

            meeting = threading.Barrier(len(engines), action=switch, timeout=self.cfg.drain_s)
            changes = [engine.change(servable.version, lambda: _meet(meeting)) for engine in engines]
            errors = [error for error in (_error_of(one, self.cfg.drain_s) for one in changes) if error is not None]
            for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
                raise error

    def _wait_for_sessions(self, old: list[ModelDeployment]) -> None:
        """Until every ranking request that these engines were told of has come, or will not."""
        end_s = self._clock.now_s() + self.cfg.session_s
        engines = [fleet.engines for fleet in old]
        while self._clock.now_s() < end_s:
            with self._lock:
                if not any(fleet.engines in engines for fleet, _ in self._expected.values()):
                    return
            self._clock.sleep(_POLL_S)

    @property
    def is_live(self) -> bool:
        """No engine has died: one that has does not come back in this process."""
        return all(engine.is_alive for fleet in self.fleets.values() for engine in fleet.engines)

    @property
    def is_ready(self) -> bool:
        """Engines are warmed up before they are here at all."""
        return not self.is_draining and all(
            any(engine.is_alive for engine in fleet.engines) for fleet in self.fleets.values()
        )

    def close(self) -> None:
        for fleet in self.fleets.values():
            fleet.close(self.cfg.drain_s)

    def _fleet(self, servable: Servable) -> ModelDeployment:
        """All of its engines, or none: the model may not be sound, and memory may not suffice for one of them."""
        check_sound(servable)
        _ = servable.item_ids  # takes a second for a million names, which the first request would wait for
        form = make_form(servable, self.cfg.slide_events)
        with contextlib.ExitStack() as made:
            engines = []
            for _ in range(self.cfg.instances):
                engine = Engine(
                    form, self.cfg.engine, keyed=self._keyed, clock=self._clock, on_lost=self._on_engine_lost
                )
                engines.append(engine)
                made.callback(engines[-1].close)
            made.pop_all()
        return ModelDeployment(servable, tuple(engines))

    def _begin(self, user: str) -> int:
        """A user's slot, until `_end`."""
        with self._lock:
            for number in range(self.cfg.instances):
                self.router.set_alive(number, self._is_alive(number))
            route = self.router.begin(user)
        if route is None:
            raise UnavailableError("no instance is alive", 1.0)
        return route.slot

    def _is_alive(self, number: int) -> bool:
        return all(fleet.engines[number].is_alive for fleet in self.fleets.values())


def _meet(meeting: threading.Barrier) -> None:
    meeting.wait()


def _error_of(change: "Future[None]", timeout_s: float) -> BaseException | None:
    try:
        return change.exception(timeout_s + 1.0)
    except TimeoutError as error:
        return error


async def _result(work: EngineRequest, timeout_s: float) -> RankResult:
    """asyncio.wrap_future inside of asyncio.timeout, in half of their time."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[bool] = loop.create_future()
    work.future.add_done_callback(lambda _: loop.call_soon_threadsafe(_wake, waiter, True))
    timer = loop.call_later(timeout_s, _wake, waiter, False)
    try:
        is_there = await waiter
    except asyncio.CancelledError:
        work.future.cancel()
        raise
    finally:
        timer.cancel()
    if not is_there and work.future.cancel():
        raise UnavailableError("the deadline passed", 0.05)
    return work.future.result()


def _wake(waiter: "asyncio.Future[bool]", is_there: bool) -> None:
    if not waiter.done():
        waiter.set_result(is_there)


def role_of(servable: Servable) -> str:
    return servable.serving.role
