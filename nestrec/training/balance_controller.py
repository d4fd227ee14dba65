"""Sample balancing (load balancing of samples over ranks) in a run.

`BalanceController` owns the sample partitioner, measures stragglers and imbalance of the steps, and decides when the
cost model of samples is refitted and when the shares of ranks are retuned.

Compute times are read from the spans of the trace: host time, or on a GPU CUDA events of the compute stream, which are
converted to times when a report is made. So no step waits for the device.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.balance import BalanceConfig
from nestrec.balance.balance_metrics import find_slow_rank, mean_wait_times, sum_per_step, summarize_steps
from nestrec.balance.cost import (
    MIN_STEPS,
    CostChange,
    CostModel,
    CostModelHistory,
    Measurement,
    RankLoads,
    refit_cost,
    retune_shares,
)
from nestrec.balance.sample_exchange import make_partitioner
from nestrec.balance.simple_policies import PowerTuning
from nestrec.base.errors import UserError
from nestrec.data.batch_loader import Batch
from nestrec.data.batch_order import BatchPosition, SamplePartitioner
from nestrec.distributed import Topology
from nestrec.distributed.collectives import all_gather_json
from nestrec.pipeline.schedule_spec import MAX_BATCHES_AHEAD
from nestrec.tasks.task import Task, TrainingCost
from nestrec.trace import Span, Tracer

COMPUTE_SPAN = "train.forward_backward"
_NUM_QUANTILES = 257
"""Number of quantiles of sample lengths that the cost model is fitted on, since the operations of local attention are
not quadratic in the length."""


@dataclass
class _StepRecords:
    """Measurements of this rank's steps since the last report."""

    tokens: list[tuple[float, float, float]] = field(default_factory=list)
    """(tokens, squared tokens, number) of this rank's samples per step."""
    is_newest: list[bool] = field(default_factory=list)
    """Whether the batch of each step was partitioned after the last change."""
    figures: list[Mapping[str, float]] = field(default_factory=list)
    counts: dict[str, list[int]] = field(default_factory=dict)
    """Number of collectives per step for each communicator."""


class BalanceController:
    """Measures and adjusts the balance of a run.

    All ranks call each method at the same steps; `report` is collective.
    """

    def __init__(self, cfg: BalanceConfig, *, num_prefetched: int, topology: Topology, tracer: Tracer):
        """Create a controller; `num_prefetched` is the number of batches that may be partitioned before their step."""
        _check_shares(cfg, topology)
        self._cfg = cfg
        self._topology = topology
        self._costs = CostModelHistory(cfg.known_cost, cfg.replay_changes, tuning=cfg.power_tuning)
        self.partitioner: SamplePartitioner = make_partitioner(cfg, self._costs, topology.groups, tracer)
        self._delay = num_prefetched + MAX_BATCHES_AHEAD
        self._communicators = _groups(topology)
        self._durations_ns: dict[str, list[int]] = {name: [] for name in self._communicators}
        self._records = _StepRecords()
        self._measured: list[Measurement] = []
        self._loads = RankLoads.zeros(topology.world)
        self._is_warm = False
        self._last_fit = self._last_tuning = 0

    def resume(
        self, changes: Iterable[CostChange], step: int, *, fitted_from: CostModel | None = None
    ) -> tuple[tuple[CostChange, ...], list[str]]:
        """Restore the cost model and shares of a resumed run, so that samples are partitioned as before.

        Fitted costs and tuned shares are restored only while fitting or tuning is enabled. Otherwise, or if the
        configured cost differs from the one that the fit started from, the current config applies. Shares are per rank,
        so they are dropped if the number of ranks changed.

        Args:
            changes: Changes saved by the run.
            step: Step that the run resumes from; later changes are ignored.
            fitted_from: Configured cost model when the changes were saved; None if unknown.

        Returns:
            The restored changes, and messages about changes that were dropped.
        """
        cfg = self._cfg
        world = self._topology.world
        is_fitting = cfg.fit_every_steps is not None and fitted_from in (None, cfg.known_cost)
        restored, notes = [], []
        for change in (change for change in changes if change.step <= step):
            tuning = change.tuning if cfg.tune_every_steps is not None else cfg.power_tuning
            if tuning is not None and len(tuning.shares) != world:
                notes = [f"dropped the tuned shares of {len(tuning.shares)} ranks, because the run now has {world}"]
                tuning = cfg.power_tuning
            restored.append(replace(change, cost=change.cost if is_fitting else cfg.known_cost, tuning=tuning))
        if not is_fitting and cfg.tune_every_steps is None:
            restored = []
        self._costs.restore(cfg.replay_changes or restored)
        self._last_fit = self._last_tuning = step
        return tuple(self._costs.changes), [] if cfg.replay_changes else notes

    def start(self) -> None:
        """Start measuring, at the beginning or after an evaluation, whose collectives must not count."""
        self._records = _StepRecords(counts={name: [] for name in self._communicators})
        for name in self._communicators:
            self._topology.log.take_durations_ns(name)
            self._durations_ns[name] = []

    def record_step(self, batch: Batch) -> None:
        """Record the measurements of a finished step."""
        tokens = batch.tokens.astype(np.float64)
        self._records.tokens.append((float(tokens.sum()), float(tokens @ tokens), float(len(tokens))))
        self._records.is_newest.append(self._costs.is_newest(batch.position))
        self._records.figures.append(batch.balance_metrics)
        for name in self._communicators:
            durations = self._topology.log.take_durations_ns(name)
            self._durations_ns[name] += durations
            self._records.counts[name].append(len(durations))

    def report(self, spans: Sequence[Span], last_step: int) -> dict[str, Any]:
        """Return balance metrics of the steps since the last report, equal on all ranks; empty with one rank."""
        records, self._records = self._records, _StepRecords(counts={name: [] for name in self._communicators})
        steps = range(last_step - len(records.tokens) + 1, last_step + 1)
        if not steps or (self._topology.world == 1 and self._cfg.fit_every_steps is None):
            return {}
        times = [_step_times(spans, step) for step in steps]
        local = {"times": times, "tokens": records.tokens, "durations": self._durations_ns}
        all_ranks = all_gather_json(self._topology.control, local)
        times_RS2, tokens_RS3 = (np.array([rank[name] for rank in all_ranks]) for name in ("times", "tokens"))
        self._remember(times_RS2[:, :, 1], tokens_RS3, records.is_newest)
        if self._topology.world == 1:
            return {}
        waiting_s = self._waiting_s([rank["durations"] for rank in all_ranks], records.counts)
        result = summarize_steps(times_RS2[:, :, 0], times_RS2[:, :, 1], waiting_s)
        measured = {"straggler": result.straggler.tolist(), "imbalance": result.imbalance.tolist()}
        partition = {name: [figures[name] for figures in records.figures] for name in records.figures[0]}
        means = {name: float(np.mean(values)) for name, values in measured.items()}
        slow = find_slow_rank(times_RS2[:, :, 1], tokens_RS3[:, :, 0])
        if slow is not None:
            means |= {"slow_rank": slow[0], "slow_factor": slow[1]}
        return {**means, "balance": {"steps": list(steps), **measured, **partition}}

    def decide(
        self, step: int, position: BatchPosition, after: Callable[[BatchPosition], BatchPosition]
    ) -> CostChange | None:
        """Return a change of the cost model or the shares, or None if none is due or it would not pay off.

        Args:
            step: The finished step.
            position: Position of the next batch.
            after: Function that returns the position after a batch.
        """
        if self._cfg.replay_changes:
            return None
        cost = self._refit(step)
        tuning = self._retune(step)
        if cost is None and tuning is None:
            return None
        for _ in range(self._delay):
            position = after(position)
        change = CostChange(
            step=step, first=position, cost=cost or self._costs.newest, tuning=tuning or self._costs.newest_tuning
        )
        self._costs.add(change)
        self._loads = RankLoads.zeros(self._topology.world)
        return change

    def _refit(self, step: int) -> CostModel | None:
        every = self._cfg.fit_every_steps
        if every is None or step // every == self._last_fit // every:
            return None
        self._last_fit = step
        measured, self._measured = self._measured, []
        return refit_cost(self._costs.newest, measured)

    def _retune(self, step: int) -> PowerTuning | None:
        every = self._cfg.tune_every_steps
        is_due = every is not None and step // every != self._last_tuning // every
        if not is_due or self._loads.num_steps < MIN_STEPS:
            return None
        self._last_tuning = step
        loads, self._loads = self._loads, RankLoads.zeros(self._topology.world)
        return retune_shares(self._costs.newest_tuning, self._costs.newest, loads)

    def _remember(
        self, compute_RS: NDArray[np.float64], tokens_RS3: NDArray[np.float64], is_newest: Sequence[bool]
    ) -> None:
        """Store measurements for the next fit, except for the first report: warm-up makes those steps slow."""
        if self._is_warm:
            pairs = zip(compute_RS.reshape(-1).tolist(), tokens_RS3[:, :, :2].reshape(-1, 2).tolist(), strict=True)
            self._measured += [Measurement(seconds, *sums) for seconds, sums in pairs if seconds > 0]
            for step in np.flatnonzero(is_newest):
                self._loads.add(compute_RS[:, step], tokens_RS3[:, step, 0], tokens_RS3[:, step, 2])
        self._is_warm = True

    def _waiting_s(
        self, durations: Sequence[Mapping[str, list[int]]], counts: Mapping[str, list[int]]
    ) -> NDArray[np.float64]:
        """Return the (S,) mean over ranks of the time that each step waited in collectives."""
        total = np.zeros(len(next(iter(counts.values()))))
        for name, groups in self._communicators.items():
            # In overlapping schedules a rank may be ahead; collectives that other ranks have not logged yet are kept.
            num_common = min(len(rank[name]) for rank in durations)
            waited_s = mean_wait_times([rank[name][:num_common] for rank in durations], groups) * 1e-9
            total += sum_per_step(waited_s, counts[name])
            self._durations_ns[name] = self._durations_ns[name][num_common:]
        return total


def resolve_balance_config(cfg: BalanceConfig, task: Task) -> BalanceConfig:
    """Return the balance config with a cost model.

    The cost model is the configured one, or the operations of the task's model, or the number of tokens if the task
    does not report its cost. A missing cost is not an error, because the assignment of samples to ranks does not change
    results.
    """
    training_cost = _training_cost(task) if cfg.cost is None else None
    if training_cost is None:
        return replace(cfg, cost=cfg.known_cost)
    lengths = np.quantile(task.collator.tokens, np.linspace(0, 1, _NUM_QUANTILES))
    token, token_squared = training_cost.flops.length_coefficients(lengths)
    return replace(cfg, cost=CostModel(token=token, token_squared=token_squared))


def _training_cost(task: Task) -> TrainingCost | None:
    """Return the cost of a task, or None if the task or its backbone does not report one."""
    try:
        return task.cost()
    except UserError:
        return None


def _check_shares(cfg: BalanceConfig, topology: Topology) -> None:
    world = topology.world
    shares = [("power_tuning", cfg.power_tuning), *(("replay_changes", change.tuning) for change in cfg.replay_changes)]
    if topology.context.size > 1:
        for name, value in [*shares, ("tune_every_steps", cfg.tune_every_steps)]:
            if value is not None:
                raise UserError(
                    "cannot be combined with context parallelism, which assigns samples to groups of ranks",
                    option=f"balance.{name}",
                    value=value,
                    remedy="remove it, or remove parallel.context_parallel",
                )
    ranks = "1 rank" if world == 1 else f"{world} ranks"
    for name, tuning in shares:
        if tuning is not None and len(tuning.shares) != world:
            raise UserError(
                f"must have one share per rank: it has {len(tuning.shares)}, but the run has {ranks}",
                option=f"balance.{name}",
                value=tuning.shares,
                remedy="run on as many ranks as there are shares, or remove it",
            )


def _groups(topology: Topology) -> dict[str, list[list[int]]]:
    """Return the communicators whose collectives block the host, and their groups of ranks.

    On a GPU only the key exchanges block the host: NCCL collectives return immediately.
    """
    shard_axis = topology.shard_axis
    replica_axis = topology.replica_axis
    between_hosts = {"keys": shard_axis, "replica_keys": replica_axis}
    if topology.device.type == "cuda":
        return between_hosts
    return {**between_hosts, "vectors": shard_axis, "replicas": replica_axis, "dense": [list(range(topology.world))]}


def _step_times(spans: Sequence[Span], step: int) -> tuple[float, float]:
    """Return the seconds of a step, and of its forward and backward passes."""
    of_step = [span for span in spans if span.step == step]
    total = sum(span.duration_ns for span in of_step if span.kind == "step")
    compute = sum(span.duration_ns for span in of_step if span.name == COMPUTE_SPAN)
    return total * 1e-9, compute * 1e-9
