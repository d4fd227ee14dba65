"""Balancing in a run: the dealer of its batches, what is measured of its steps, and when its cost model changes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.balance import BalanceConfig
from nestrec.balance.changes import CostChange, CostSchedule
from nestrec.balance.cost import CostModel
from nestrec.balance.dealer import make_dealer
from nestrec.balance.fitting import Measurement, refitted
from nestrec.balance.measured import measured_steps, per_step, waiting
from nestrec.base.errors import UserError
from nestrec.data.batches import Batch
from nestrec.data.dealing import Dealer
from nestrec.data.order import Position
from nestrec.distributed import Topology
from nestrec.distributed.exchange import all_gather_json
from nestrec.pipeline.schedule_spec import MOST_AHEAD
from nestrec.trace import Span, Tracer

COMPUTE_SPAN = "train.compute"


@dataclass
class _Watched:
    """What this rank saw of the steps since the last report."""

    tokens: list[tuple[float, float]] = field(default_factory=list)
    """(tokens, tokens squared) of this rank's samples"""
    figures: list[Mapping[str, float]] = field(default_factory=list)
    counts: dict[str, list[int]] = field(default_factory=dict)
    """collectives of each communicator in each step"""


class Balancing:
    """Every method is called by all ranks at the same steps; `report` is collective."""

    def __init__(self, cfg: BalanceConfig, *, made_ahead: int, topology: Topology, tracer: Tracer):
        """made_ahead: batches that may have been dealt before their step."""
        if cfg.fit_every_steps is not None and topology.device.type == "cuda":
            raise UserError(
                "needs computing times, which the host does not see on a GPU",
                field="balance.fit_every_steps",
                value=cfg.fit_every_steps,
                remedy="give balance.cost (nestrec.balance.hstu_cost has that of HSTU)",
            )
        self._cfg, self._topology = cfg, topology
        self._costs = CostSchedule(cfg.cost, cfg.replay)
        self.dealer: Dealer = make_dealer(cfg, self._costs, topology.samples, tracer)
        self._delay = made_ahead + MOST_AHEAD
        self._communicators = _groups(topology)
        self._durations_ns: dict[str, list[int]] = {name: [] for name in self._communicators}
        self._watched = _Watched()
        self._measured: list[Measurement] = []
        self._is_warm = False
        self._last_fit = 0

    def resume(
        self, changes: Iterable[CostChange], step: int, *, fitted_from: CostModel | None = None
    ) -> tuple[CostChange, ...]:
        """Deal as a run that stands at `step` did and would have done; the changes that it knows.

        What the run fitted binds it only while it fits: without it, or where the cost was another one when the run was
        saved (fitted_from; none where that is not known), the cost or the replay that is given now counts.
        """
        is_fitting = self._cfg.fit_every_steps is not None and fitted_from in (None, self._cfg.cost)
        taken = tuple(change for change in changes if change.step <= step) if is_fitting else ()
        self._costs.restore(self._cfg.replay or taken)
        self._last_fit = step
        return tuple(self._costs.changes)

    def start(self) -> None:
        """Steps begin, maybe after an evaluation: what was exchanged before is no part of them."""
        self._watched = _Watched(counts={name: [] for name in self._communicators})
        for name in self._communicators:
            self._topology.log.take_durations_ns(name)
            self._durations_ns[name] = []

    def watch(self, batch: Batch) -> None:
        """A step is over."""
        tokens = batch.tokens.astype(np.float64)
        self._watched.tokens.append((float(tokens.sum()), float(tokens @ tokens)))
        self._watched.figures.append(batch.figures)
        for name in self._communicators:
            taken = self._topology.log.take_durations_ns(name)
            self._durations_ns[name] += taken
            self._watched.counts[name].append(len(taken))

    def report(self, spans: Sequence[Span], last_step: int) -> dict[str, Any]:
        """What the steps since the last report were like, the same on every rank; nothing where there is one rank."""
        watched, self._watched = self._watched, _Watched(counts={name: [] for name in self._communicators})
        steps = range(last_step - len(watched.tokens) + 1, last_step + 1)
        if self._topology.world == 1 or not steps:
            return {}
        times = [_step_times(spans, step) for step in steps]
        mine = {"times": times, "tokens": watched.tokens, "durations": self._durations_ns}
        everyone = all_gather_json(self._topology.control, mine)
        times_RS2, tokens_RS2 = (np.array([rank[name] for rank in everyone]) for name in ("times", "tokens"))
        self._remember(times_RS2[:, :, 1], tokens_RS2)
        waiting_s = self._waiting_s([rank["durations"] for rank in everyone], watched.counts)
        found = measured_steps(times_RS2[:, :, 0], times_RS2[:, :, 1], waiting_s)
        measured = {"straggler": found.straggler.tolist(), "imbalance": found.imbalance.tolist()}
        dealt = {name: [figures[name] for figures in watched.figures] for name in watched.figures[0]}
        means = {name: float(np.mean(values)) for name, values in measured.items()}
        return {**means, "balance": {"steps": list(steps), **measured, **dealt}}

    def decide(self, step: int, position: Position, after: Callable[[Position], Position]) -> CostChange | None:
        """A change of the cost model, if one is due and worth it. `position`: the next batch; `after`: what follows."""
        every = self._cfg.fit_every_steps
        if every is None or self._cfg.replay or step // every == self._last_fit // every:
            return None
        self._last_fit = step
        measured, self._measured = self._measured, []
        cost = refitted(self._costs.newest, measured)
        if cost is None:
            return None
        for _ in range(self._delay):
            position = after(position)
        change = CostChange(step=step, first=position, cost=cost)
        self._costs.add(change)
        return change

    def _remember(self, compute_s: NDArray[np.float64], tokens_RS2: NDArray[np.float64]) -> None:
        """For the next fit. The first steps of a process are slow for other reasons than their samples."""
        if self._is_warm:
            pairs = zip(compute_s.reshape(-1).tolist(), tokens_RS2.reshape(-1, 2).tolist(), strict=True)
            self._measured += [Measurement(seconds, *sums) for seconds, sums in pairs if seconds > 0]
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


def _groups(topology: Topology) -> dict[str, list[list[int]]]:
    """The communicators of steps whose collectives the host waits for, and the ranks that share one of each.

    On a GPU those are the exchanges of keys: NCCL's return at once.
    """
    shard_axis, replica_axis = topology.shard_axis, topology.replica_axis
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
