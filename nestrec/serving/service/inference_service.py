"""Inference service: the engines of all models in service, session affinity of users, and hot swap of models.

The HTTP server calls `Service`. A model version is served by a `ModelDeployment`: one or more engines, among which a
router distributes the users by consistent hashing, so that the requests of a user find the prefix cache of one engine.

Models are replaced in two ways. `swap` creates new engines, warms them up and replaces the old ones at once.
`apply_version` changes the weights of running engines between two batches. A request is always computed by one version,
and a ranking request after `/v1/preinfer` by the version that prefilled the history.
"""

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
from nestrec.serving.model.model_adapter import make_adapter
from nestrec.serving.model.request_inputs import Candidates, History
from nestrec.serving.model.servable import Servable, validate_servable
from nestrec.serving.model.servable_spec import short_version
from nestrec.serving.model.served_tables import TablesConfig
from nestrec.serving.versions.live_version import LiveModelVersion, open_model, parse_model_address
from nestrec.serving.versions.version_store import READ_TIMEOUT_S

Ids = NDArray[np.int64]
_POLL_S = 0.01


class ModelSwappedError(Exception):
    """The model was swapped before the request reached it: the caller must resolve the request again and retry."""


@config
class ServiceConfig:
    engine: EngineConfig = EngineConfig()
    """Options of each engine."""
    engines_per_model: Count = 1
    """Number of engines per model, each with its own thread and prefix cache."""
    history_stride: Count | None = None
    """Number of events by which the window of a full history moves when new events arrive; none: the stride with which
    the model was evaluated (`task.history.slide_events`), so that responses equal the evaluation."""
    num_retrieved: Count = 256
    """Number of candidates that the retrieval model passes to the ranking model if both are served."""
    drain_timeout_s: NonNegative = 30.0
    """Timeout in seconds for accepted requests when the service shuts down or swaps a model."""
    session_timeout_s: NonNegative = 2.0
    """Time in seconds after /v1/preinfer during which ranking requests of the user are processed by the same model
    version, even if a newer one is in service."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ModelDeployment:
    """Engines of one model version. A request uses a single deployment, so that it never mixes versions."""

    servable: Servable
    engines: tuple[Engine, ...]
    loaded_at_s: float = field(default_factory=time.time)
    """Time at which the model was loaded, in Unix seconds."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the model's outputs: the scores of a candidate."""
        return self.engines[0].adapter.outputs

    def close(self, drain_s: float) -> None:
        for engine in self.engines:
            engine.drain(drain_s)
        for engine in self.engines:
            engine.close()


@dataclass(slots=True)
class Reloads:
    """Reloads that were requested, and their result."""

    num_requested: int = 0
    """Number of requested reloads."""
    num_done: int = 0
    """Number of requested reloads that are finished; equal to `num_requested` if none is pending."""
    has_failed: bool = False
    """Whether the last reload failed and the previous models stay in service; the log contains the reason."""


class Service:
    """Serves one retrieval model, one ranking model, or both. Thread-safe."""

    def __init__(
        self,
        models: Mapping[str, Servable],
        cfg: ServiceConfig,
        clock: Clock | None = None,
        on_engine_lost: Callable[[], None] = lambda: None,
    ):
        """Create and warm up the engines of all models.

        Args:
            models: Models by role (`retrieval`, `ranking`).
            cfg: Options of the service.
            clock: Clock of sessions and the router; None uses the real one.
            on_engine_lost: Called on the thread of an engine that cannot continue.
        """
        self.cfg = cfg
        self._clock = clock or RealClock()
        self._keyed = KeyedHash()
        self._on_engine_lost = on_engine_lost
        self._lock = threading.Lock()
        self.sources: dict[str, str] = {}
        """Folder or address from which each model was loaded, by role."""
        self.live_versions: dict[str, LiveModelVersion] = {}
        """Models that were loaded from published versions, by role."""
        self._swap_lock = threading.Lock()
        self.add_items_lock = threading.Lock()
        """Held while cold-start items are added."""
        self.reloads = Reloads()
        self.is_draining = False
        """Whether the server reports not ready, so that load balancers drain it; requests are still served."""
        self._return_transit_s = 0.0
        self._sessions: OrderedDict[str, tuple[ModelDeployment, float]] = OrderedDict()
        self.deployments = {role: self._make_deployment(servable) for role, servable in models.items()}
        ring = Ring.make(cfg.engines_per_model, self._keyed)
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
        """Load models and create the service.

        Args:
            models: Folders written by `nestrec export`, or addresses of published versions; one per role.
            cfg: Options of the service.
            device: Device of the models.
            tables: Options of the embedding tables.
            on_engine_lost: Called on the thread of an engine that cannot continue.
            read_timeout_s: Timeout in seconds for reading a file of a published version.

        Raises:
            UserError: A model cannot be loaded, or two models have the same role.
        """
        servables: dict[str, Servable] = {}
        sources: dict[str, str] = {}
        live_versions: dict[str, LiveModelVersion] = {}
        for text in map(str, models):
            address = parse_model_address(text)
            live = None if address is None else open_model(address, device, tables, read_timeout_s=read_timeout_s)
            servable = Servable.load(Path(text), device, tables) if live is None else live.servable
            role = role_of(servable)
            require(
                role not in servables,
                f"a second {role} model; a server serves at most one",
                option="MODEL",
                value=text,
                remedy="remove one of them",
            )
            servables[role] = servable
            sources[role] = text
            if live is not None:
                live_versions[role] = live
        service = Service(servables, cfg, on_engine_lost=on_engine_lost)
        service.sources = sources
        service.live_versions = live_versions
        return service

    def deployment(self, role: str) -> ModelDeployment:
        """Return the deployment in service; requests that started on an older one are completed there."""
        return self.deployments[role]

    def session_deployment(self, user: str) -> ModelDeployment:
        """Return the deployment for a user's pre-infer request and pin the user to it until `session_timeout_s`.

        Choosing and pinning are atomic with respect to model swaps.
        """
        with self._lock:
            deployment = self.deployments[self.ranker]
            now_s = self._clock.now_s()
            self._sessions.pop(user, None)
            while self._sessions and next(iter(self._sessions.values()))[1] <= now_s:
                self._sessions.popitem(last=False)
            self._sessions[user] = (deployment, now_s + self.cfg.session_timeout_s)
            return deployment

    def ranking_deployment(self, user: str) -> ModelDeployment:
        """Return the deployment for a user's ranking request: the pinned one if the user has a session."""
        with self._lock:
            deployment, until_s = self._sessions.get(user, (None, 0.0))
        return deployment if deployment is not None and until_s > self._clock.now_s() else self.deployments[self.ranker]

    def _end_session(self, user: str) -> None:
        """Unpin a user whose ranking request has arrived."""
        with self._lock:
            self._sessions.pop(user, None)

    @property
    def ranker(self) -> str:
        """Role of the model that scores candidates: `ranking` if there is a ranking model, otherwise `retrieval`."""
        return "ranking" if "ranking" in self.deployments else "retrieval"

    def overload_error(self, role: str, sender: RequestSource) -> OverloadedError | None:
        """Return the error for an unparsed request if no engine has capacity for one of its size, otherwise None."""
        return (
            self.deployments[role].engines[0].reject() if self.is_overloaded(self.deployments[role], sender) else None
        )

    @staticmethod
    def is_overloaded(deployment: ModelDeployment, sender: RequestSource) -> bool:
        """Return whether no engine has capacity for a request of this sender, whatever its content."""
        return all(engine.is_overloaded_for(sender) for engine in deployment.engines)

    async def rank(
        self, deployment: ModelDeployment, user: str, history: History, candidates: Candidates, *, timeout_s: float
    ) -> RankResult:
        """Return the scores of candidates, computed by the user's engine.

        If that engine has died, another one computes them without cached keys and values.

        Args:
            deployment: Deployment with which the request was resolved (ids to rows).
            user: User id.
            history: Events of the user.
            candidates: Items to score.
            timeout_s: Seconds until the deadline of the request.

        Raises:
            ModelSwappedError: The deployment is no longer in service, or its vocabulary has changed.
            OverloadedError: The engine rejected the request (admission control).
            UnavailableError: No engine is alive, or the deadline has passed.
        """
        sender = replace(current_sender.get(), return_transit_s=self._return_transit_s)
        slot, request = self.submit_rank(deployment, user, history, candidates, timeout_s=timeout_s, sender=sender)
        try:
            result = await _wait_for_result(request, timeout_s)
            self._return_transit_s = time.perf_counter() - request.ended_s
            self.check_vocabulary(deployment, result)
            tracing.record_engine_spans(
                request.times(),
                prefix_source=result.source,
                num_cached=result.num_cached,
                model_version=short_version(result.version),
                num_candidates=len(candidates),
            )
            return result
        finally:
            self.release_slot(slot)

    def submit_rank(
        self,
        deployment: ModelDeployment,
        user: str,
        history: History,
        candidates: Candidates,
        *,
        timeout_s: float,
        sender: RequestSource,
    ) -> tuple[int, EngineRequest]:
        """Queue a ranking request at the user's engine; return the engine's slot, to be released, and the request."""
        slot = self._acquire_slot(user)
        try:
            request = deployment.engines[slot].submit_rank(
                user, history, candidates, timeout_s=timeout_s, sender=sender
            )
        except BaseException as error:
            self.release_slot(slot)
            if isinstance(error, UnavailableError):
                self._end_session(user)
                if deployment not in self.deployments.values():
                    raise ModelSwappedError from None
            raise
        self._end_session(user)
        return slot, request

    def release_slot(self, slot: int) -> None:
        with self._lock:
            self.router.end(slot)

    def check_vocabulary(self, deployment: ModelDeployment, result: RankResult) -> None:
        """Raise `ModelSwappedError` if a newer version with a different vocabulary computed the result of a request.

        Args:
            deployment: Deployment with which the request was resolved (ids to rows).
            result: Result of the request.
        """
        if result.version != deployment.servable.version and self._has_grown_since(deployment):
            raise ModelSwappedError

    def _has_grown_since(self, deployment: ModelDeployment) -> bool:
        """Return whether ids of a request that was resolved with a deployment could resolve differently now."""
        old = deployment.servable
        now = [other.servable for other in self.deployments.values() if other.engines == deployment.engines]
        return not now or now[0].item_keys is not old.item_keys or now[0].spec.columns is not old.spec.columns

    async def preinfer(
        self,
        deployment: ModelDeployment,
        user: str,
        history: History,
        now_ms: int,
        num_candidates: int,
        *,
        timeout_s: float,
    ) -> Decision:
        """Announce a ranking request to the user's engine, which may prefill the history ahead of it."""
        sender = current_sender.get()
        return self.submit_preinfer(
            deployment, user, history, now_ms, num_candidates, timeout_s=timeout_s, sender=sender
        )

    def submit_preinfer(
        self,
        deployment: ModelDeployment,
        user: str,
        history: History,
        now_ms: int,
        num_candidates: int,
        *,
        timeout_s: float,
        sender: RequestSource,
    ) -> Decision:
        """Same as `preinfer`, but with an explicit sender."""
        slot = self._acquire_slot(user)
        try:
            engine = deployment.engines[slot]
            return engine.submit_preinfer(user, history, now_ms, num_candidates, timeout_s=timeout_s, sender=sender)[0]
        except UnavailableError:
            if deployment not in self.deployments.values():
                raise ModelSwappedError from None
            raise
        finally:
            self.release_slot(slot)

    async def would_admit_preinfer(
        self, user: str, num_events: int, num_candidates: int
    ) -> tuple[ModelDeployment, Decision]:
        """Return whether the user's engine would admit a pre-infer request, without the events of the history.

        Args:
            user: User id.
            num_events: Number of events in the history.
            num_candidates: Expected number of candidates.
        """
        deployment = self.deployments[self.ranker]
        slot = self._acquire_slot(user)
        try:
            return deployment, deployment.engines[slot].would_admit_preinfer(num_events, num_candidates)
        finally:
            self.release_slot(slot)

    def min_preinfer_events(self, num_candidates: int) -> int:
        """Return the minimum number of history events for which pre-inference currently pays off on any engine."""
        return min(engine.min_preinfer_events(num_candidates) for engine in self.deployments[self.ranker].engines)

    def forget(self, user: str) -> None:
        """Evict the cached keys and values of a user on all engines."""
        for deployment in self.deployments.values():
            for engine in deployment.engines:
                engine.forget(user)

    def swap(self, *servables: Servable) -> None:
        """Replace models by other versions, all at once, after their engines are warmed up (hot swap).

        Requests in progress and announced ranking requests are completed by the version that they started with.

        Raises:
            UserError: A model has a role that this server does not serve.
        """
        for servable in servables:
            if role_of(servable) not in self.deployments:
                remedy = f"serve a {' or '.join(self.deployments)} model, or start a server of both"
                raise UserError(
                    "this server does not serve a model of this role",
                    option="model",
                    value=role_of(servable),
                    remedy=remedy,
                )
        with self._swap_lock:
            self._swap(servables)

    def _swap(self, servables: Sequence[Servable]) -> None:
        new: dict[str, ModelDeployment] = {}
        with contextlib.ExitStack() as cleanup:
            for servable in servables:
                new[role_of(servable)] = deployment = self._make_deployment(servable)
                cleanup.callback(deployment.close, 0.0)
            cleanup.pop_all()
        with self._lock:
            old = [self.deployments[role] for role in new]
            self.deployments = {**self.deployments, **new}
        self._wait_for_sessions(old)
        for deployment in old:
            deployment.close(self.cfg.drain_timeout_s)

    def apply_version(self, role: str, servable: Servable, change: Callable[[], None]) -> None:
        """Update a model to a later version in place, without a second copy of its tables.

        All engines of the model pause between two batches during the update. Requests that they have partly computed
        are restarted, so that no response is computed by two versions.

        Args:
            role: Role of the model.
            servable: The later version; it shares tables and weights with the one in service.
            change: Writes the changes to tables and weights, or raises an exception and leaves them unchanged.

        Raises:
            BaseException: The error of `change`, or of an engine that did not pause in time.
        """
        with self._swap_lock:
            deployment = self.deployments[role]
            engines = [engine for engine in deployment.engines if engine.is_alive]

            def switch() -> None:
                change()
                for engine in deployment.engines:
                    engine.adapter.follow(servable)
                with self._lock:
                    self.deployments = {**self.deployments, role: ModelDeployment(servable, deployment.engines)}

            barrier = threading.Barrier(len(engines), action=switch, timeout=self.cfg.drain_timeout_s)
            changes = [engine.apply_between_batches(servable.version, lambda: _wait_at(barrier)) for engine in engines]
            errors = [
                error for error in (_error_of(one, self.cfg.drain_timeout_s) for one in changes) if error is not None
            ]
            for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
                raise error

    def _wait_for_sessions(self, old: list[ModelDeployment]) -> None:
        """Wait until each session that is pinned to one of these deployments has ended or timed out."""
        end_s = self._clock.now_s() + self.cfg.session_timeout_s
        engines = [deployment.engines for deployment in old]
        while self._clock.now_s() < end_s:
            with self._lock:
                if not any(deployment.engines in engines for deployment, _ in self._sessions.values()):
                    return
            self._clock.sleep(_POLL_S)

    @property
    def is_live(self) -> bool:
        """Whether all engines are alive (liveness); an engine that has died is not restarted in this process."""
        return all(engine.is_alive for deployment in self.deployments.values() for engine in deployment.engines)

    @property
    def is_ready(self) -> bool:
        """Whether each model has an engine that is alive, and the server is not draining (readiness).

        Warm-up does not matter, because engines are warmed up before they become part of a deployment.
        """
        return not self.is_draining and all(
            any(engine.is_alive for engine in deployment.engines) for deployment in self.deployments.values()
        )

    def close(self) -> None:
        for deployment in self.deployments.values():
            deployment.close(self.cfg.drain_timeout_s)

    def _make_deployment(self, servable: Servable) -> ModelDeployment:
        """Create the engines of a model; close them again if one fails, for example because of insufficient memory."""
        validate_servable(servable)
        _ = servable.item_ids  # built now: a million ids take a second, for which the first request would wait
        adapter = make_adapter(servable, self.cfg.history_stride)
        with contextlib.ExitStack() as cleanup:
            engines = []
            for _ in range(self.cfg.engines_per_model):
                engine = Engine(
                    adapter, self.cfg.engine, keyed=self._keyed, clock=self._clock, on_lost=self._on_engine_lost
                )
                engines.append(engine)
                cleanup.callback(engines[-1].close)
            cleanup.pop_all()
        return ModelDeployment(servable, tuple(engines))

    def _acquire_slot(self, user: str) -> int:
        """Return the slot of the user's engine, which counts the request until `release_slot`."""
        with self._lock:
            for number in range(self.cfg.engines_per_model):
                self.router.set_alive(number, self._is_alive(number))
            route = self.router.begin(user)
        if route is None:
            raise UnavailableError("no engine is alive", 1.0)
        return route.slot

    def _is_alive(self, number: int) -> bool:
        return all(deployment.engines[number].is_alive for deployment in self.deployments.values())


def _wait_at(barrier: threading.Barrier) -> None:
    barrier.wait()


def _error_of(change: "Future[None]", timeout_s: float) -> BaseException | None:
    try:
        return change.exception(timeout_s + 1.0)
    except TimeoutError as error:
        return error


async def _wait_for_result(request: EngineRequest, timeout_s: float) -> RankResult:
    """Wait for the result of an engine. Same as asyncio.wrap_future inside asyncio.timeout, in half of the time."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[bool] = loop.create_future()
    request.future.add_done_callback(lambda _: loop.call_soon_threadsafe(_wake, waiter, True))
    timer = loop.call_later(timeout_s, _wake, waiter, False)
    try:
        is_done = await waiter
    except asyncio.CancelledError:
        request.future.cancel()
        raise
    finally:
        timer.cancel()
    if not is_done and request.future.cancel():
        raise UnavailableError("the deadline has passed", 0.05)
    return request.future.result()


def _wake(waiter: "asyncio.Future[bool]", is_done: bool) -> None:
    if not waiter.done():
        waiter.set_result(is_done)


def role_of(servable: Servable) -> str:
    """Return the role of a model: `retrieval` or `ranking`."""
    return servable.serving.role
