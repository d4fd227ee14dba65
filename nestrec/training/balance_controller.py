"""Balancing in a run: the dealer of its batches, what is measured of its steps, and when its cost model changes.

Computing times are those of the trace's spans: of the host, or on a GPU of events in the stream that computes, which
become times when a report asks for them. So nothing waits inside a step.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.balance import BalanceConfig
from nestrec.balance.balance_metrics import measured_steps, per_step, slow_rank, waiting
from nestrec.balance.cost import (
    LEAST_STEPS,
    CostChange,
    CostModel,
    CostModelHistory,
    Measurement,
    RankLoads,
    refitted,
    retuned,
)
from nestrec.balance.sample_exchange import make_dealer
from nestrec.balance.simple_policies import PowerTuning
from nestrec.base.errors import UserError
from nestrec.data.batch_loader import Batch
from nestrec.data.batch_order import BatchPosition, SamplePartitioner
from nestrec.distributed import Topology
from nestrec.distributed.collectives import all_gather_json
from nestrec.pipeline.schedule_spec import MOST_AHEAD
from nestrec.tasks.task import Task, TrainingCost
from nestrec.trace import Span, Tracer

COMPUTE_SPAN = "train.compute"
_NUM_QUANTILES = 257
"""lengths that stand for all, where attention does not see everything and operations are no square of a length"""


@dataclass
class _Watched:
    """What this rank saw of the steps since the last report."""

    tokens: list[tuple[float, float, float]] = field(default_factory=list)
    """(tokens, tokens squared, number) of this rank's samples"""
    is_newest: list[bool] = field(default_factory=list)
    """whether a step was dealt after the last change"""
    figures: list[Mapping[str, float]] = field(default_factory=list)
    counts: dict[str, list[int]] = field(default_factory=dict)
    """collectives of each communicator in each step"""


class BalanceController:
    """Every method is called by all ranks at the same steps; `report` is collective."""

    def __init__(self, cfg: BalanceConfig, *, made_ahead: int, topology: Topology, tracer: Tracer):
        """made_ahead: batches that may have been dealt before their step."""
        _check_shares(cfg, topology)
        self._cfg = cfg
        self._topology = topology
        self._costs = CostModelHistory(cfg.known_cost, cfg.replay, tuning=cfg.tuning)
        self.dealer: SamplePartitioner = make_dealer(cfg, self._costs, topology.groups, tracer)
        self._delay = made_ahead + MOST_AHEAD
        self._communicators = _groups(topology)
        self._durations_ns: dict[str, list[int]] = {name: [] for name in self._communicators}
        self._watched = _Watched()
        self._measured: list[Measurement] = []
        self._loads = RankLoads.nothing(topology.world)
        self._is_warm = False
        self._last_fit = self._last_tuning = 0

    def resume(
        self, changes: Iterable[CostChange], step: int, *, fitted_from: CostModel | None = None
    ) -> tuple[tuple[CostChange, ...], list[str]]:
        """Deal as a run that stands at `step` did and would have done; the changes that it knows, and what of them it
        cannot take over, in words.

        What the run fitted or tuned binds it only while it does so: without it, or where the cost was another one when
        the run was saved (fitted_from; none where that is not known), what is given now counts. Shares are those of a
        number of ranks, and mean nothing to another one.
        """
        cfg = self._cfg
        world = self._topology.world
        is_fitting = cfg.fit_every_steps is not None and fitted_from in (None, cfg.known_cost)
        taken, notes = [], []
        for change in (change for change in changes if change.step <= step):
            tuning = change.tuning if cfg.tune_every_steps is not None else cfg.tuning
            if tuning is not None and len(tuning.shares) != world:
                notes = [f"shares tuned for {len(tuning.shares)} ranks are dropped: there are {world} now"]
                tuning = cfg.tuning
            taken.append(replace(change, cost=change.cost if is_fitting else cfg.known_cost, tuning=tuning))
        if not is_fitting and cfg.tune_every_steps is None:
            taken = []
        self._costs.restore(cfg.replay or taken)
        self._last_fit = self._last_tuning = step
        return tuple(self._costs.changes), [] if cfg.replay else notes

    def start(self) -> None:
        """Steps begin, maybe after an evaluation: what was exchanged before is no part of them."""
        self._watched = _Watched(counts={name: [] for name in self._communicators})
        for name in self._communicators:
            self._topology.log.take_durations_ns(name)
            self._durations_ns[name] = []

    def watch(self, batch: Batch) -> None:
        """A step is over."""
        tokens = batch.tokens.astype(np.float64)
        self._watched.tokens.append((float(tokens.sum()), float(tokens @ tokens), float(len(tokens))))
        self._watched.is_newest.append(self._costs.is_newest(batch.position))
        self._watched.figures.append(batch.figures)
        for name in self._communicators:
            taken = self._topology.log.take_durations_ns(name)
            self._durations_ns[name] += taken
            self._watched.counts[name].append(len(taken))

    def report(self, spans: Sequence[Span], last_step: int) -> dict[str, Any]:
        """What the steps since the last report were like, the same on every rank; nothing where there is one rank."""
        watched, self._watched = self._watched, _Watched(counts={name: [] for name in self._communicators})
        steps = range(last_step - len(watched.tokens) + 1, last_step + 1)
        if not steps or (self._topology.world == 1 and self._cfg.fit_every_steps is None):
            return {}
        times = [_step_times(spans, step) for step in steps]
        mine = {"times": times, "tokens": watched.tokens, "durations": self._durations_ns}
        everyone = all_gather_json(self._topology.control, mine)
        times_RS2, tokens_RS3 = (np.array([rank[name] for rank in everyone]) for name in ("times", "tokens"))
        self._remember(times_RS2[:, :, 1], tokens_RS3, watched.is_newest)
        if self._topology.world == 1:
            return {}
        waiting_s = self._waiting_s([rank["durations"] for rank in everyone], watched.counts)
        found = measured_steps(times_RS2[:, :, 0], times_RS2[:, :, 1], waiting_s)
        measured = {"straggler": found.straggler.tolist(), "imbalance": found.imbalance.tolist()}
        dealt = {name: [figures[name] for figures in watched.figures] for name in watched.figures[0]}
        means = {name: float(np.mean(values)) for name, values in measured.items()}
        slow = slow_rank(times_RS2[:, :, 1], tokens_RS3[:, :, 0])
        if slow is not None:
            means |= {"slow_rank": slow[0], "slow_factor": slow[1]}
        return {**means, "balance": {"steps": list(steps), **measured, **dealt}}

    def decide(
        self, step: int, position: BatchPosition, after: Callable[[BatchPosition], BatchPosition]
    ) -> CostChange | None:
        """A change of cost model or shares, if one is due and worth it. `position`: the next batch; `after`: what
        follows it."""
        if self._cfg.replay:
            return None
        cost = self._refitted(step)
        tuning = self._retuned(step)
        if cost is None and tuning is None:
            return None
        for _ in range(self._delay):
            position = after(position)
        change = CostChange(
            step=step, first=position, cost=cost or self._costs.newest, tuning=tuning or self._costs.newest_tuning
        )
        self._costs.add(change)
        self._loads = RankLoads.nothing(self._topology.world)
        return change

    def _refitted(self, step: int) -> CostModel | None:
        every = self._cfg.fit_every_steps
        if every is None or step // every == self._last_fit // every:
            return None
        self._last_fit = step
        measured, self._measured = self._measured, []
        return refitted(self._costs.newest, measured)

    def _retuned(self, step: int) -> PowerTuning | None:
        every = self._cfg.tune_every_steps
        is_due = every is not None and step // every != self._last_tuning // every
        if not is_due or self._loads.num_steps < LEAST_STEPS:
            return None
        self._last_tuning = step
        loads, self._loads = self._loads, RankLoads.nothing(self._topology.world)
        return retuned(self._costs.newest_tuning, self._costs.newest, loads)

    def _remember(
        self, compute_RS: NDArray[np.float64], tokens_RS3: NDArray[np.float64], is_newest: Sequence[bool]
    ) -> None:
        """For the next fit. The first steps of a process are slow for other reasons than their samples."""
        if self._is_warm:
            pairs = zip(compute_RS.reshape(-1).tolist(), tokens_RS3[:, :, :2].reshape(-1, 2).tolist(), strict=True)
            self._measured += [Measurement(seconds, *sums) for seconds, sums in pairs if seconds > 0]
            for step in np.flatnonzero(is_newest):
                self._loads.add(compute_RS[:, step], tokens_RS3[:, step, 0], tokens_RS3[:, step, 2])
        self._is_warm = True

    def _waiting_s(
        self, durations: Sequence[Mapping[str, list[int]]], counts: Mapping[str, list[int]]
    ) -> NDArray[np.float64]:
        """(S,) mean over ranks of the time waited in the collectives of each step."""
        total = np.zeros(len(next(iter(counts.values()))))
        for name, groups in self._communicators.items():
            # A rank's threads may be ahead in a schedule that overlaps; what others have not seen yet stays.
            seen = min(len(rank[name]) for rank in durations)
            waited_s = waiting([rank[name][:seen] for rank in durations], groups) * 1e-9
            total += per_step(waited_s, counts[name])
            self._durations_ns[name] = self._durations_ns[name][seen:]
        return total


def settled(cfg: BalanceConfig, task: Task) -> BalanceConfig:
    """The same with a cost model: the one given, or the operations of the task's model, or tokens where it tells none.

    Which rank computes a sample changes no result, so what a task does not tell is no reason to refuse it.
    """
    told = _told(task) if cfg.cost is None else None
    if told is None:
        return replace(cfg, cost=cfg.known_cost)
    some = np.quantile(task.assembler.tokens, np.linspace(0, 1, _NUM_QUANTILES))
    token, token_squared = told.flops.of_length(some)
    return replace(cfg, cost=CostModel(token=token, token_squared=token_squared))


def _told(task: Task) -> TrainingCost | None:
    """What a task tells of its cost; a backbone that does not tell its operations refuses to answer."""
    try:
        return task.cost()
    except UserError:
        return None


def _check_shares(cfg: BalanceConfig, topology: Topology) -> None:
    world = topology.world
    given = [("tuning", cfg.tuning), *(("replay", change.tuning) for change in cfg.replay)]
    if topology.context.size > 1:
        for name, value in [*given, ("tune_every_steps", cfg.tune_every_steps)]:
            if value is not None:
                raise UserError(
                    "shares are those of single ranks, and samples are dealt to context groups",
                    option=f"balance.{name}",
                    value=value,
                    remedy="leave it out, or leave ranks.context out",
                )
    for name, tuning in given:
        if tuning is not None and len(tuning.shares) != world:
            raise UserError(
                f"has shares of {len(tuning.shares)} ranks, and there are {world}",
                option=f"balance.{name}",
                value=tuning.shares,
                remedy="run on as many ranks, or leave it out",
            )


def _groups(topology: Topology) -> dict[str, list[list[int]]]:
    """The communicators of steps whose collectives the host waits for, and the ranks that share one of each.

    On a GPU those are the exchanges of keys: NCCL's return at once.
    """
    shard_axis = topology.shard_axis
    replica_axis = topology.replica_axis
    between_hosts = {"keys": shard_axis, "replica_keys": replica_axis}
    if topology.device.type == "cuda":
        return between_hosts
    return {**between_hosts, "vectors": shard_axis, "replicas": replica_axis, "dense": [list(range(topology.world))]}


def _step_times(spans: Sequence[Span], step: int) -> tuple[float, float]:
    """(seconds of the step, seconds of forward and backward passes in it)."""
    mine = [span for span in spans if span.step == step]
    whole = sum(span.duration_ns for span in mine if span.kind == "step")
    compute = sum(span.duration_ns for span in mine if span.name == COMPUTE_SPAN)
    return whole * 1e-9, compute * 1e-9
