"""Rounds of contestants by turns: on real ranks, or in this process as one rank of an emulated fabric."""

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
    "all_to_all_ms": ("train.embedding.vectors", "train.embedding.gradients"),
    "replica_sync_ms": ("train.embedding.replicas",),
}
_DENSE = "train.dense.reduce"

Entry = tuple[str, int, bool]
"""Schedule, micro-batches, window cache."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the contestants train, and under what."""

    job: JobConfig
    ranks: int
    """processes"""
    device: str
    link: EmulatedLink
    is_timed: bool
    """the link is timed, not real"""
    pace: Pace
    shares_table: bool
    """one table for all contestants"""
    groups: ParallelConfig
    """replica groups of the ranks"""
    replica_sync: ReplicaSyncConfig


@dataclass(frozen=True, slots=True)
class Length:
    """How long the contestants run."""

    rounds: int
    num_steps: int
    max_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What some rounds have shown, by entry."""

    rounds: dict[Entry, list[dict[str, float]]]
    """parts of a step, of each round"""
    bytes_sent: dict[Entry, float]
    """vectors and gradients of a step; of TorchRec all that it sends"""
    bytes_on_link: dict[Entry, float]
    """all that a step sends over a real link, as the link counts"""
    difference: dict[Entry, float | None]
    """from the weights of serial at the same partition; none where tables are shared"""
    replica_bytes: dict[Entry, float]
    """gradients or rows that a step sends to other holders"""
    collision_rate: float
    """part of the distinct keys of a rank's batch that its batch before holds too"""


def run_rounds(
    conditions: Conditions, entries: Sequence[Entry], rounds: int, num_steps: int, max_s: float = float("inf")
) -> Measured:
    """All entries by turns. max_s: no round begins later than this, but the first."""
    given = (conditions, list(entries), Length(rounds, num_steps, max_s))
    if conditions.link.num_ranks > 1:
        answers = [_rank(Topology.single(conditions.device), *given)]
    elif conditions.is_timed:
        answers = run_on_ranks(conditions.ranks, _rank, *given)
    else:
        with limited_links(conditions.ranks, conditions.link.mbit) as links:
            answers = run_on_ranks(conditions.ranks, _rank, *given, enter=links.enter)
    return Measured(
        {
            e: [_parts(spans) for spans in zip(*(answer["spans"][e] for answer in answers), strict=True)]
            for e in entries
        },
        {e: max(answer["bytes"][e] for answer in answers) for e in entries},
        {e: max(answer["on_link"][e] for answer in answers) for e in entries},
        {e: _largest([answer["difference"][e] for answer in answers]) for e in entries},
        {e: max(answer["replica_bytes"].get(e, 0.0) for answer in answers) for e in entries},
        statistics.fmean(answer["collision_rate"] for answer in answers),
    )


def _rank(topology: Topology, conditions: Conditions, entries: list[Entry], length: Length) -> dict[str, Any]:
    """All contestants by turns on one rank."""
    num_steps = length.num_steps
    if conditions.groups.replicas > 1:
        topology = Topology.of_process_group(topology.device, conditions.groups)
    if conditions.is_timed:
        topology = with_emulated_links(topology, conditions.link)
    contestants = _contestants(topology, conditions, entries, num_batches=num_steps + 3)
    spans: dict[Entry, list[list[Span]]] = {entry: [] for entry in entries}
    on_link = dict.fromkeys(entries, 0.0)
    next_step = 1  # one count for all: a shared table sees the steps of each of them
    start_s = time.monotonic()
    for turn in range(_WARM_UP_ROUNDS + length.rounds):
        is_late = turn > _WARM_UP_ROUNDS and time.monotonic() - start_s > length.max_s
        if broadcast_json(topology.control, is_late):
            break
        for entry, contestant in contestants.items():
            barrier(topology.control)
            before = bytes_on_link()
            taken = contestant.round(num_steps, next_step)
            next_step += num_steps
            if turn >= _WARM_UP_ROUNDS:
                spans[entry].append(taken)
                on_link[entry] = (bytes_on_link() - before) / num_steps
    ours = {entry: c for entry, c in contestants.items() if isinstance(c, Contestant)}
    sent = {e: c.bytes_a_step(conditions.link.num_ranks) for e, c in ours.items()}
    answer = {
        "spans": spans,
        "bytes": {entry: sent.get(entry, on_link[entry]) for entry in entries},
        "on_link": on_link,
        "replica_bytes": {e: c.replica_bytes_a_step() for e, c in ours.items()},
        "collision_rate": _collision_rate(make_batches(conditions.job, topology, num_steps, 1)),
        "difference": dict.fromkeys(entries) | ({} if conditions.shares_table else _differences(ours)),
    }
    for contestant in ours.values():
        contestant.close()
    return answer


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


def _difference(mine: torch.Tensor, serial: torch.Tensor) -> float:
    return float((mine - serial).abs().max()) if len(mine) == len(serial) else float("inf")


def _largest(differences: Sequence[float | None]) -> float | None:
    known = [difference for difference in differences if difference is not None]
    return max(known) if known else None


def _parts(spans_of_ranks: Sequence[Sequence[Span]]) -> dict[str, float]:
    """Mean milliseconds of the middle steps of a round, on the rank whose steps took longest."""
    everything = [span for spans in spans_of_ranks for span in spans]
    timeline = Timeline(everything)
    steps = sorted({span.step for span in everything if span.kind == "step" and span.step is not None})[1:-1]
    ranks = []
    for rank in range(len(spans_of_ranks)):
        whole = [timeline.parts(step, rank) for step in steps]
        raw = [timeline.raw(step, rank) for step in steps]
        dense = [timeline.exposed(step, "communication", rank).get(_DENSE, 0) for step in steps]
        copies = [s.duration_ns for s in spans_of_ranks[rank] if s.name == "train.embedding.copy" and s.step in steps]
        ranks.append(
            {
                "step_ms": _mean_ms([p.step_ns for p in whole]),
                "compute_ms": _mean_ms([p.compute_ns for p in whole]),
                "raw_lookup_ms": _mean_ms([r.lookup_ns for r in raw]),
                "exposed_lookup_ms": _mean_ms([p.exposed_lookup_ns for p in whole]),
                "raw_comm_ms": _mean_ms([r.communication_ns for r in raw]),
                "exposed_comm_ms": _mean_ms([p.exposed_communication_ns for p in whole]),
                "exposed_dense_ms": _mean_ms(dense),
                "exposed_rows_ms": _mean_ms([p.exposed_communication_ns for p in whole]) - _mean_ms(dense),
                "idle_ms": _mean_ms([p.idle_ns for p in whole]),
                "copy_ms": sum(copies) * 1e-6 / len(steps),
            }
        )
    collectives = {name: _collective_ms(everything, names, len(steps) + 2) for name, names in _TRAFFIC.items()}
    return {**max(ranks, key=lambda parts: parts["step_ms"]), **collectives}


def _collective_ms(spans: Sequence[Span], names: Sequence[str], num_steps: int) -> float:
    """Mean milliseconds a step; the rank that enters a collective last waits for nobody, so the shortest counts."""
    shortest: dict[tuple[Any, ...], int] = {}
    number: Counter[tuple[Any, ...]] = Counter()  # an exchange in two halves has two spans of one name
    for span in sorted(spans, key=lambda span: span.start_ns):
        if span.name in names:
            place = span.name, span.step, span.micro_batch
            nth = (*place, number[span.rank, *place])
            number[span.rank, *place] += 1
            shortest[nth] = min(shortest.get(nth, span.duration_ns), span.duration_ns)
    return sum(shortest.values()) * 1e-6 / num_steps


def _mean_ms(durations_ns: Sequence[int]) -> float:
    return statistics.fmean(durations_ns) * 1e-6
