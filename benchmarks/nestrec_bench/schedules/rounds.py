"""Rounds in which contestants take turns, on real ranks or in this process as one rank of an emulated fabric."""

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nestrec.data.batch_loader import Batch
from nestrec.distributed import Topology
from nestrec.distributed.collectives import barrier, broadcast_json
from nestrec.distributed.topology import ParallelConfig
from nestrec.embedding.routing.replica_key_union import ReplicaSyncConfig
from nestrec.pipeline import PipelineConfig
from nestrec.trace import Span, Timeline
from nestrec_bench.harness.delayed_engine import Pace
from nestrec_bench.harness.links import EmulatedLink, bytes_on_link, limited_links, with_emulated_links
from nestrec_bench.harness.local_ranks import run_on_ranks
from nestrec_bench.schedules.schedules_job import TABLE, Contestant, JobConfig, make_batches, make_engine
from nestrec_bench.schedules.torchrec_tokens import PREFIX, TorchRecContestant

_WARM_UP_ROUNDS = 1
_TRAFFIC = {
    "all_to_all_ms": ("train.embedding.exchange_vectors", "train.embedding.exchange_gradients"),
    "replica_sync_ms": ("train.embedding.sync_replicas",),
}
_DENSE = "train.dense.all_reduce"

Entry = tuple[str, int, bool]
"""Schedule, number of micro-batches, and whether the window cache is used."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """The job of the contestants, and the ranks, links and tables with which they train it."""

    job: JobConfig
    ranks: int
    """Number of processes."""
    device: str
    link: EmulatedLink
    is_emulated: bool
    """Whether the link is emulated by waiting."""
    pace: Pace
    shares_table: bool
    """Whether all contestants use one table."""
    groups: ParallelConfig
    """Replica groups of the ranks."""
    replica_sync: ReplicaSyncConfig


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """Number of rounds and steps, and the time limit."""

    rounds: int
    num_steps: int
    max_s: float


@dataclass(frozen=True, slots=True)
class Measurements:
    """Results of some rounds, by entry."""

    rounds: dict[Entry, list[dict[str, float]]]
    """Parts of a step, per round."""
    bytes_sent: dict[Entry, float]
    """Bytes of vectors and gradients that a step sends; for TorchRec, all bytes that it sends."""
    bytes_on_link: dict[Entry, float]
    """All bytes that a step sends over a real link, as counted by the link."""
    difference: dict[Entry, float | None]
    """Largest difference from the weights of serial at the same partition; None if tables are shared."""
    replica_bytes: dict[Entry, float]
    """Bytes of gradients or rows that a step sends to other replicas."""
    collision_rate: float
    """Fraction of the distinct keys of a rank's batch that its previous batch contains too."""


def run_rounds(
    conditions: Conditions, entries: Sequence[Entry], rounds: int, num_steps: int, max_s: float = float("inf")
) -> Measurements:
    """Measure all entries, which take turns.

    Args:
        conditions: Job, ranks, links and tables.
        entries: Entries to measure.
        rounds: Maximum number of rounds.
        num_steps: Number of steps per round.
        max_s: Seconds after which no further round starts, except the first one.
    """
    arguments = (conditions, list(entries), RoundLimits(rounds, num_steps, max_s))
    if conditions.link.num_ranks > 1:
        results = [_rank(Topology.single(conditions.device), *arguments)]
    elif conditions.is_emulated:
        results = run_on_ranks(conditions.ranks, _rank, *arguments)
    else:
        with limited_links(conditions.ranks, conditions.link.mbit) as links:
            results = run_on_ranks(conditions.ranks, _rank, *arguments, enter=links.enter)
    return Measurements(
        {
            e: [_parts(spans) for spans in zip(*(result["spans"][e] for result in results), strict=True)]
            for e in entries
        },
        {e: max(result["bytes"][e] for result in results) for e in entries},
        {e: max(result["on_link"][e] for result in results) for e in entries},
        {e: _largest([result["difference"][e] for result in results]) for e in entries},
        {e: max(result["replica_bytes"].get(e, 0.0) for result in results) for e in entries},
        statistics.fmean(result["collision_rate"] for result in results),
    )


def _rank(topology: Topology, conditions: Conditions, entries: list[Entry], limits: RoundLimits) -> dict[str, Any]:
    """Run all contestants on one rank, taking turns."""
    num_steps = limits.num_steps
    if conditions.groups.num_replicas > 1:
        topology = Topology.of_process_group(topology.device, conditions.groups)
    if conditions.is_emulated:
        topology = with_emulated_links(topology, conditions.link)
    contestants = _contestants(topology, conditions, entries, num_batches=num_steps + 3)
    spans: dict[Entry, list[list[Span]]] = {entry: [] for entry in entries}
    on_link = dict.fromkeys(entries, 0.0)
    next_step = 1  # counted over all contestants, because a shared table receives the steps of each
    start_s = time.monotonic()
    for turn in range(_WARM_UP_ROUNDS + limits.rounds):
        is_late = turn > _WARM_UP_ROUNDS and time.monotonic() - start_s > limits.max_s
        if broadcast_json(topology.control, is_late):
            break
        for entry, contestant in contestants.items():
            barrier(topology.control)
            before = bytes_on_link()
            round_spans = contestant.round(num_steps, next_step)
            next_step += num_steps
            if turn >= _WARM_UP_ROUNDS:
                spans[entry].append(round_spans)
                on_link[entry] = (bytes_on_link() - before) / num_steps
    ours = {entry: c for entry, c in contestants.items() if isinstance(c, Contestant)}
    sent = {e: c.bytes_per_step(conditions.link.num_ranks) for e, c in ours.items()}
    result = {
        "spans": spans,
        "bytes": {entry: sent.get(entry, on_link[entry]) for entry in entries},
        "on_link": on_link,
        "replica_bytes": {e: c.replica_bytes_per_step() for e, c in ours.items()},
        "collision_rate": _collision_rate(make_batches(conditions.job, topology, num_steps, 1)),
        "difference": dict.fromkeys(entries) | ({} if conditions.shares_table else _differences(ours)),
    }
    for contestant in ours.values():
        contestant.close()
    return result


def _contestants(
    topology: Topology, conditions: Conditions, entries: Sequence[Entry], num_batches: int
) -> dict[Entry, Contestant | TorchRecContestant]:
    job = conditions.job
    batches = {n: make_batches(job, topology, num_batches, n) for n in {entry[1] for entry in entries}}
    shared = make_engine(job, topology, conditions.pace, conditions.replica_sync) if conditions.shares_table else None
    found: dict[Entry, Contestant | TorchRecContestant] = {}
    for entry in entries:
        schedule, num_micro_batches, window_cache = entry
        if schedule.startswith(PREFIX):
            found[entry] = TorchRecContestant(job, schedule, batches[num_micro_batches], topology.rank)
            continue
        options = PipelineConfig(schedule=schedule, window_cache=window_cache)
        engine = shared or make_engine(job, topology, conditions.pace, conditions.replica_sync)
        found[entry] = Contestant(job, engine, options, batches[num_micro_batches])
    return found


def _collision_rate(batches: Sequence[Batch]) -> float:
    distinct = [np.unique(batch.micro_batches[0].keys[TABLE]) for batch in batches]
    return float(np.mean([np.isin(b, a).mean() for a, b in itertools.pairwise(distinct)]))


def _differences(contestants: dict[Entry, Contestant]) -> dict[Entry, float]:
    weights = {entry: contestant.weights() for entry, contestant in contestants.items()}
    return {e: _difference(w, weights.get(("serial", e[1], e[2]), w)) for e, w in weights.items()}


def _difference(weights: torch.Tensor, serial: torch.Tensor) -> float:
    return float((weights - serial).abs().max()) if len(weights) == len(serial) else float("inf")


def _largest(differences: Sequence[float | None]) -> float | None:
    known = [difference for difference in differences if difference is not None]
    return max(known) if known else None


def _parts(spans_of_ranks: Sequence[Sequence[Span]]) -> dict[str, float]:
    """Return the mean milliseconds of the middle steps of a round, on the rank with the longest steps."""
    all_spans = [span for spans in spans_of_ranks for span in spans]
    timeline = Timeline(all_spans)
    steps = sorted({span.step for span in all_spans if span.kind == "step" and span.step is not None})[1:-1]
    ranks = []
    for rank in range(len(spans_of_ranks)):
        parts = [timeline.parts(step, rank) for step in steps]
        raw = [timeline.raw(step, rank) for step in steps]
        dense = [timeline.exposed(step, "communication", rank).get(_DENSE, 0) for step in steps]
        copies = [
            s.duration_ns
            for s in spans_of_ranks[rank]
            if s.name == "train.embedding.copy_shared_rows" and s.step in steps
        ]
        ranks.append(
            {
                "step_ms": _mean_ms([p.step_ns for p in parts]),
                "compute_ms": _mean_ms([p.compute_ns for p in parts]),
                "raw_lookup_ms": _mean_ms([r.lookup_ns for r in raw]),
                "exposed_lookup_ms": _mean_ms([p.exposed_lookup_ns for p in parts]),
                "raw_comm_ms": _mean_ms([r.communication_ns for r in raw]),
                "exposed_comm_ms": _mean_ms([p.exposed_communication_ns for p in parts]),
                "exposed_dense_ms": _mean_ms(dense),
                "exposed_rows_ms": _mean_ms([p.exposed_communication_ns for p in parts]) - _mean_ms(dense),
                "idle_ms": _mean_ms([p.idle_ns for p in parts]),
                "copy_ms": sum(copies) * 1e-6 / len(steps),
            }
        )
    collectives = {name: _collective_ms(all_spans, names, len(steps) + 2) for name, names in _TRAFFIC.items()}
    return {**max(ranks, key=lambda parts: parts["step_ms"]), **collectives}


def _collective_ms(spans: Sequence[Span], names: Sequence[str], num_steps: int) -> float:
    """Return the mean milliseconds of collectives per step.

    The shortest span of a collective counts, because the rank that enters it last does not wait for others.
    """
    shortest: dict[tuple[Any, ...], int] = {}
    number: Counter[tuple[Any, ...]] = Counter()  # an exchange in two halves has two spans of one name
    for span in sorted(spans, key=lambda span: span.start_ns):
        if span.name in names:
            stage = span.name, span.step, span.micro_batch
            nth = (*stage, number[span.rank, *stage])
            number[span.rank, *stage] += 1
            shortest[nth] = min(shortest.get(nth, span.duration_ns), span.duration_ns)
    return sum(shortest.values()) * 1e-6 / num_steps


def _mean_ms(durations_ns: Sequence[int]) -> float:
    return statistics.fmean(durations_ns) * 1e-6
