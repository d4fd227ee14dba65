"""`nestrec bench schedules`: every schedule on the same batches, over real links of limited bandwidth.

Ranks are processes in network namespaces (see limited_links). All schedules live in the same ranks and take turns, a
round of a few steps each, so that they share whatever else the machine does. A round goes from an empty pipeline to an
empty pipeline; its first and last step are left out. Figures are medians of rounds on the slowest rank; times of parts
come from trace spans and add up to the step. `step_over_bound` and `exposed_over_raw` compare with the parts of serial
at the same partition; with `own` they compare with the parts of the very steps, which other load spoils less.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nestrec.base.config import config
from nestrec.base.errors import UserError
from nestrec.bench.limited_links import can_limit, limited_links
from nestrec.bench.ranks import run_on_ranks
from nestrec.bench.schedules_job import Contestant, JobConfig, make_batches
from nestrec.data.batches import Batch
from nestrec.distributed import Topology
from nestrec.distributed.exchange import barrier
from nestrec.pipeline import PipelineConfig
from nestrec.trace import Span, Timeline

_UNLIMITED_MBIT = 100_000.0
_WARM_UP_ROUNDS = 1


@config
class SchedulesBench:
    ranks: int = 2
    """processes, each with one thread of computing"""
    link_mbit: float | None = None
    """megabits a second of each rank's link, each way; none: such that communication takes comm_share of compute"""
    emulated: bool = False
    """time the links instead of limiting them; also done, and said, where network namespaces cannot be had"""
    comm_share: float = 0.7
    """raw communication as a part of compute, where link_mbit is not given"""
    micro_batches: tuple[int, ...] = (4, 8)
    """numbers of micro-batches that are compared"""
    schedules: tuple[str, ...] = ("serial", "stale", "dual_buffer", "frozen_window", "nested")
    """which schedules"""
    window_cache: tuple[bool, ...] = (False, True)
    """with and without the window cache"""
    rounds: int = 7
    """rounds of each schedule"""
    steps: int = 8
    """steps of a round"""
    job: JobConfig = JobConfig()
    """what is trained"""


Entry = tuple[str, int, bool]
"""Schedule, micro-batches, window cache."""


def measure_schedules(bench: SchedulesBench) -> list[dict[str, Any]]:
    """A row for each schedule, number of micro-batches and cache setting."""
    if bench.steps < 4:
        raise UserError("must be at least 4", field="steps", value=bench.steps, remedy="first and last are left out")
    link_mbit = bench.link_mbit if bench.link_mbit is not None else _calibrated_mbit(bench)
    measured = _run(bench, _entries(bench), link_mbit, bench.rounds)
    rows = [_row(entry, bench, link_mbit, measured) for entry in _entries(bench)]
    best = min(row["step_ms"] for row in rows if row["schedule"] == "serial" and row["micro_batches"] == 1)
    of = {(row["schedule"], row["micro_batches"], row["window_cache"]): row for row in rows}
    for row in rows:
        row["speedup"] = round(best / row["step_ms"], 3)
        same = of["serial", row["micro_batches"], row["window_cache"]]
        uncached = of["serial", row["micro_batches"], False]
        bound_ms = same["compute_ms"] + same["raw_comm_ms"] / row["micro_batches"]
        row["step_over_bound"] = round(row["step_ms"] / bound_ms, 3)
        row["exposed_over_raw"] = round(row["exposed_comm_ms"] / uncached["raw_comm_ms"], 3)
        own_bound_ms = row["compute_ms"] + row["raw_comm_ms"] / row["micro_batches"]
        row["step_over_own_bound"] = round(row["step_ms"] / own_bound_ms, 3)
        row["exposed_over_own_raw"] = round(row["exposed_comm_ms"] / row["raw_comm_ms"], 3)
    return rows


def short_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What fits a terminal; lookup and communication are exposed/raw milliseconds."""
    return [
        {
            "schedule": row["schedule"], "N": row["micro_batches"], "cache": row["window_cache"],
            "step": row["step_ms"], "compute": row["compute_ms"],
            "lookup": f"{row['exposed_lookup_ms']:.1f}/{row['raw_lookup_ms']:.1f}",
            "comm": f"{row['exposed_comm_ms']:.0f}/{row['raw_comm_ms']:.0f}", "idle": row["idle_ms"],
            "speedup": row["speedup"], "bound": row["step_over_bound"], "diff": row["max_abs_diff"],
        }
        for row in rows
    ]  # fmt: skip


def is_emulated(bench: SchedulesBench) -> bool:
    """Whether links are only timed: where asked for, or where network namespaces cannot be had."""
    return bench.emulated or not can_limit()


def _entries(bench: SchedulesBench) -> list[Entry]:
    """Serial at N = 1 is what speeds are compared with; serial at every partition is what weights are compared with."""
    entries: list[Entry] = [("serial", 1, False)]
    for num_parts in bench.micro_batches:
        for cache in bench.window_cache:
            names = ["serial", *(name for name in bench.schedules if name != "serial")]
            entries += [(name, num_parts, cache) for name in names]
    if False not in bench.window_cache:
        entries += [("serial", num_parts, False) for num_parts in bench.micro_batches]
    return list(dict.fromkeys(entries))


def _calibrated_mbit(bench: SchedulesBench) -> float:
    """The bandwidth at which the exchanges of the median partition take `comm_share` of its computation."""
    num_parts = sorted(bench.micro_batches)[len(bench.micro_batches) // 2]
    entry: Entry = ("serial", num_parts, False)
    measured = _run(bench, [entry], _UNLIMITED_MBIT, 3)
    compute_ms = statistics.median(part["compute_ms"] for part in measured["parts"][entry])
    return float(measured["bytes"][entry] * 8e-3 / (bench.comm_share * compute_ms))


def _run(bench: SchedulesBench, entries: Sequence[Entry], link_mbit: float, rounds: int) -> dict[str, Any]:
    """Parts of each round, bytes of a step and difference from serial, by entry."""
    if is_emulated(bench):
        answers = run_on_ranks(bench.ranks, _rank, bench, list(entries), rounds, link_mbit)
    else:
        with limited_links(bench.ranks, link_mbit) as links:
            answers = run_on_ranks(bench.ranks, _rank, bench, list(entries), rounds, None, enter=links.enter)
    parts = {
        entry: [_parts([answer["spans"][entry][r] for answer in answers]) for r in range(rounds)] for entry in entries
    }
    return {
        "parts": parts,
        "bytes": {entry: max(answer["bytes"][entry] for answer in answers) for entry in entries},
        "difference": {entry: max(answer["difference"][entry] for answer in answers) for entry in entries},
    }


def _rank(
    topology: Topology, bench: SchedulesBench, entries: list[Entry], rounds: int, emulated_mbit: float | None
) -> dict[str, Any]:
    """All contestants by turns on one rank."""
    if emulated_mbit is not None:
        topology = topology.with_emulated_links(emulated_mbit)
    num_batches = bench.steps * 2 + 3
    batches = {n: make_batches(bench.job, topology, num_batches, n) for n in {entry[1] for entry in entries}}
    contestants = {entry: _contestant(bench.job, topology, entry, batches[entry[1]]) for entry in entries}
    spans: dict[Entry, list[list[Span]]] = {entry: [] for entry in entries}
    for turn in range(_WARM_UP_ROUNDS + rounds):
        for entry, contestant in contestants.items():
            barrier(topology.control)
            taken = contestant.round(bench.steps)
            if turn >= _WARM_UP_ROUNDS:
                spans[entry].append(taken)
    steps = bench.steps * (_WARM_UP_ROUNDS + rounds)
    statistics_of = {entry: contestant.engine.statistics for entry, contestant in contestants.items()}
    weights = {entry: contestant.weights() for entry, contestant in contestants.items()}
    answer = {
        "spans": spans,
        "bytes": {e: (s.vectors.bytes_sent + s.gradients.bytes_sent) / steps for e, s in statistics_of.items()},
        "difference": {e: _difference(w, weights.get(("serial", e[1], e[2]), w)) for e, w in weights.items()},
    }
    for contestant in contestants.values():
        contestant.close()
    return answer


def _contestant(job: JobConfig, topology: Topology, entry: Entry, batches: list[Batch]) -> Contestant:
    schedule, _, window_cache = entry
    options = PipelineConfig(schedule=schedule, window_cache=window_cache)  # type: ignore[arg-type]
    return Contestant(job, topology, options, batches)


def _difference(mine: torch.Tensor, serial: torch.Tensor) -> float:
    return float((mine - serial).abs().max()) if len(mine) == len(serial) else float("inf")


def _parts(spans_of_ranks: Sequence[Sequence[Span]]) -> dict[str, float]:
    """Mean milliseconds of the middle steps of a round, on the rank whose steps took longest."""
    everything = [span for spans in spans_of_ranks for span in spans]
    timeline = Timeline(everything)
    steps = sorted({span.step for span in everything if span.kind == "step" and span.step is not None})[1:-1]
    ranks = []
    for rank in range(len(spans_of_ranks)):
        whole = [timeline.parts(step, rank) for step in steps]
        raw = [timeline.raw(step, rank) for step in steps]
        ranks.append(
            {
                "step_ms": _mean_ms([p.step_ns for p in whole]),
                "compute_ms": _mean_ms([p.compute_ns for p in whole]),
                "raw_lookup_ms": _mean_ms([r.lookup_ns for r in raw]),
                "exposed_lookup_ms": _mean_ms([p.exposed_lookup_ns for p in whole]),
                "raw_comm_ms": _mean_ms([r.communication_ns for r in raw]),
                "exposed_comm_ms": _mean_ms([p.exposed_communication_ns for p in whole]),
                "idle_ms": _mean_ms([p.idle_ns for p in whole]),
            }
        )
    return max(ranks, key=lambda parts: parts["step_ms"])


def _mean_ms(durations_ns: Sequence[int]) -> float:
    return statistics.fmean(durations_ns) * 1e-6


def _row(entry: Entry, bench: SchedulesBench, link_mbit: float, measured: Mapping[str, Any]) -> dict[str, Any]:
    rounds = measured["parts"][entry]
    medians = {name: round(statistics.median(part[name] for part in rounds), 3) for name in rounds[0]}
    times = sorted(part["step_ms"] for part in rounds)
    return {
        "schedule": entry[0], "ranks": bench.ranks, "replicas": 1, "micro_batches": entry[1], "window_cache": entry[2],
        "link_mbit": round(link_mbit, 1), "link": "emulated" if is_emulated(bench) else "namespaces", **medians,
        "step_ms_spread": [round(times[0], 2), round(times[-1], 2)],
        "sent_mb": round(measured["bytes"][entry] * 1e-6, 3),
        "max_abs_diff": measured["difference"][entry],
    }  # fmt: skip
