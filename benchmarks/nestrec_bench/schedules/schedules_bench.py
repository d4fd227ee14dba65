"""Every schedule on the same batches, over limited links between real ranks (real as root, else emulated).

Ranks are processes in network namespaces (see limited_links), or, with `fabric_ranks`, this process alone stands for
one rank of many that are like it, on a CPU or a GPU, and the time of its exchanges is emulated; so may its lookups be.
All schedules live in the same processes and take turns, a round of a few steps each, so that they share whatever else
the machine does. A round goes from an empty pipeline to an empty pipeline; its first and last step are left out.
Figures are medians of rounds on the slowest rank; times of parts come from trace spans and add up to the step.
`step_over_bound` and `exposed_over_raw` compare with the parts of serial at the same partition; with `own` they compare
with the parts of the very steps, which other load spoils less.

    nestrec bench schedules --ranks 2 --micro_batches 4,8 --link_mbit 500 --job.dim 64
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from nestrec.base.config import config
from nestrec.base.errors import UserError
from nestrec.distributed.topology import ParallelConfig
from nestrec.embedding.routing.replica_key_union import ReplicaSyncConfig
from nestrec.pipeline.micro_batch_tuner import CANDIDATES, FEW, MANY
from nestrec.pipeline.window_cost_model import MeasuredWindow, choose_window, fit_window, overlapped_ms
from nestrec_bench.bench import Bench, Shown
from nestrec_bench.harness.delayed_engine import Pace
from nestrec_bench.harness.links import EmulatedLink, can_limit
from nestrec_bench.schedules.rounds import Conditions, Entry, Measured, run_rounds
from nestrec_bench.schedules.schedules_job import JobConfig
from nestrec_bench.schedules.torchrec_tokens import PREFIX, TORCHREC_SCHEDULES

_UNLIMITED_MBIT = 1e6
_REAL_UNLIMITED_MBIT = 100_000.0


@config
class SchedulesBench:
    ranks: int = 2
    """processes, each with one thread of computing"""
    device: Literal["cpu", "cuda"] = "cpu"
    """where to compute; cuda goes with fabric_ranks"""
    link_mbit: float | None = None
    """megabits a second of each rank's link, each way; none: such that communication takes comm_share of compute"""
    emulated: bool = False
    """time the links instead of limiting them; also done, and said, where network namespaces cannot be had"""
    fabric_ranks: int = 1
    """more than 1: one process stands for one of so many ranks, and its exchanges of vectors are emulated"""
    latency_us: float = 0.0
    """of an exchange over the emulated fabric"""
    comm_share: float = 0.7
    """raw communication as a part of compute, where link_mbit is not given"""
    lookup_share: float | None = None
    """raw lookup as a part of compute: what the real one lacks is added as emulated waits; none: nothing is added"""
    lookup_stages: tuple[float, ...] = (0.43, 0.02, 0.33, 0.22)
    """how an emulated lookup divides: samples prefetched and loaded, keys exchanged, rows read, rows written"""
    calibrate_at: int | None = None
    """number of micro-batches at which the shares hold; none: the median of those compared"""
    micro_batches: tuple[int, ...] = (4, 8)
    """numbers of micro-batches that are compared"""
    auto: bool = False
    """compare also the number that batch.micro_batches=auto would take"""
    schedules: tuple[str, ...] = ("serial", "stale", "semi_async", "dual_buffer", "frozen_window", "nested", "priority")
    """which schedules"""
    others_at: int | None = None
    """number of micro-batches at which schedules other than serial and nested run, without the window cache; none: at
    all of them"""
    torchrec: bool = False
    """compare with TorchRec, over links on which its own communication takes comm_share of the rest of its step"""
    window_cache: tuple[bool, ...] = (False, True)
    """with and without the window cache"""
    shares_table: bool = False
    """one table for all schedules, where memory holds no more; weights are then not compared"""
    replicas: int = 1
    """replica groups of the ranks"""
    replica_sync: ReplicaSyncConfig = ReplicaSyncConfig()
    """how copies of rows are kept alike"""
    rounds: int = 7
    """rounds of each schedule"""
    steps: int = 8
    """steps of a round"""
    max_s: float = 3600.0
    """no round begins after so many seconds of rounds, but the first"""
    job: JobConfig = JobConfig()
    """what is trained"""


def measure_schedules(bench: SchedulesBench) -> list[dict[str, Any]]:
    """A row for each schedule, number of micro-batches and cache setting."""
    _check(bench)
    conditions = _calibrated(bench)
    entries = _entries(bench)
    chosen = _auto_window(bench, conditions) if bench.auto else None
    if chosen is not None:
        entries = list(dict.fromkeys([*entries, *_of_partition(replace(bench, schedules=("nested",)), chosen)]))
    measured = run_rounds(conditions, entries, bench.rounds, bench.steps, bench.max_s)
    rows = [_row(entry, bench, conditions, measured) for entry in entries]
    _compare(rows)
    if bench.torchrec:
        _compare_with_torchrec(rows, measured)
    for row in rows:
        row["is_auto"] = row["micro_batches"] == chosen
    return rows


def _compare(rows: Sequence[dict[str, Any]]) -> None:
    """Ratios to serial and to the bounds."""
    best = min(row["step_ms"] for row in rows if row["schedule"] == "serial" and row["micro_batches"] == 1)
    of = {(row["schedule"], row["micro_batches"], row["window_cache"]): row for row in rows}
    for row in rows:
        row["speedup"] = round(best / row["step_ms"], 3)
        if row["schedule"].startswith(PREFIX):  # of whose steps no parts are known
            row.update(dict.fromkeys(_UNKNOWN))
            continue
        uncached = of["serial", row["micro_batches"], False]
        same = of.get(("serial", row["micro_batches"], row["window_cache"]), uncached)
        bound_ms = same["compute_ms"] + same["raw_comm_ms"] / row["micro_batches"]
        row["step_over_bound"] = round(row["step_ms"] / bound_ms, 3)
        row["exposed_over_raw"] = round(row["exposed_comm_ms"] / max(uncached["raw_comm_ms"], 1e-9), 4)
        own_bound_ms = row["compute_ms"] + row["raw_comm_ms"] / row["micro_batches"]
        row["step_over_own_bound"] = round(row["step_ms"] / own_bound_ms, 3)
        row["exposed_over_own_raw"] = round(row["exposed_comm_ms"] / max(row["raw_comm_ms"], 1e-9), 4)


def _compare_with_torchrec(rows: Sequence[dict[str, Any]], measured: Measured) -> None:
    """`torchrec_ratio`: TorchRec's step over ours, median and quartiles over rounds, TorchRec in its quicker way.

    It is the product of three: what overlap gives (serial over this row), what sending fewer bytes gives (serial with
    the time of the bytes that TorchRec sends more, over serial), and the rest, which is how the work is done.
    """
    of = {row["schedule"]: row for row in rows if row["micro_batches"] == 1}
    quicker = min(TORCHREC_SCHEDULES, key=lambda schedule: float(of[schedule]["step_ms"]))
    theirs = [r["step_ms"] for r in measured.rounds[quicker, 1, False]]
    serial_ms = of["serial"]["step_ms"]
    more_ms = (of[quicker]["on_link_mb"] - of["serial"]["on_link_mb"]) * 8e3 / of["serial"]["link_mbit"]
    for row in rows:
        ours = measured.rounds[row["schedule"], row["micro_batches"], row["window_cache"]]
        ratios = [t / mine["step_ms"] for t, mine in zip(theirs, ours, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        row["torchrec_ratio"] = round(middle, 3)
        row["torchrec_ratio_quartiles"] = [round(low, 3), round(high, 3)]
        row["ratio_of_overlap"] = round(serial_ms / row["step_ms"], 3)
        row["ratio_of_bytes"] = round((serial_ms + more_ms) / serial_ms, 3)
        row["ratio_of_rest"] = round(middle / row["ratio_of_overlap"] / row["ratio_of_bytes"], 3)


def short_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What fits a terminal; lookup and communication are exposed/raw milliseconds."""
    return [
        {
            "schedule": row["schedule"],
            "N": row["micro_batches"],
            "cache": row["window_cache"],
            "step": row["step_ms"],
            "compute": row["compute_ms"],
            "lookup": _exposed(row, "lookup"),
            "comm": _exposed(row, "comm"),
            "idle": row["idle_ms"],
            "speedup": row["speedup"],
            "bound": row["step_over_bound"],
            "diff": row["max_abs_diff"],
        }
        for row in rows
    ]


def _exposed(row: Mapping[str, Any], kind: str) -> str:
    exposed, raw = row[f"exposed_{kind}_ms"], row[f"raw_{kind}_ms"]
    return "" if raw is None else f"{exposed:.1f}/{raw:.1f}"


def is_emulated(bench: SchedulesBench) -> bool:
    """Whether links are only timed: where asked for, or where network namespaces cannot be had."""
    return bench.emulated or bench.fabric_ranks > 1 or not can_limit()


def _check(bench: SchedulesBench) -> None:
    if bench.steps < 4:
        raise UserError("must be at least 4", option="steps", value=bench.steps, remedy="first and last are left out")
    if bench.device == "cuda" and bench.fabric_ranks == 1:
        remedy = "give the number of ranks that the one GPU stands for one of, say --fabric_ranks 16"
        raise UserError("is needed on a GPU", option="fabric_ranks", value=1, remedy=remedy)
    if len(bench.lookup_stages) != 4 or abs(sum(bench.lookup_stages) - 1) > 1e-6:
        remedy = "give four parts of one whole"
        raise UserError("must add up to 1", option="lookup_stages", value=bench.lookup_stages, remedy=remedy)


def _entries(bench: SchedulesBench) -> list[Entry]:
    """Serial at N = 1 is what speeds are compared with; serial at every partition is what weights are compared with."""
    entries: list[Entry] = [("serial", 1, False)]
    entries += [(name, 1, False) for name in TORCHREC_SCHEDULES if bench.torchrec]
    for num_micro_batches in bench.micro_batches:
        entries += _of_partition(bench, num_micro_batches)
    return list(dict.fromkeys(entries))


def _of_partition(bench: SchedulesBench, num_micro_batches: int) -> list[Entry]:
    entries: list[Entry] = [("serial", num_micro_batches, False)]
    for cache in bench.window_cache:
        if not bench.shares_table:
            entries.append(("serial", num_micro_batches, cache))
        for name in bench.schedules:
            is_wanted = (
                name == "nested" or bench.others_at is None or (bench.others_at == num_micro_batches and not cache)
            )
            if name != "serial" and is_wanted:
                entries.append((name, num_micro_batches, cache))
    return entries


def _calibrated(bench: SchedulesBench) -> Conditions:
    """The bandwidth and the waits at which exchanges and lookup take their shares of the computation.

    A first guess comes from steps without them, and is mended by steps under the guess: a real link takes longer than
    its bytes do, and a device that rests between computations computes faster than one that never does.
    """
    fast = _UNLIMITED_MBIT if is_emulated(bench) else _REAL_UNLIMITED_MBIT
    free = _conditions(bench, bench.link_mbit or fast, 0.0)
    if bench.link_mbit is not None and bench.lookup_share is None:
        return free
    alone, num_bytes = _calibration_parts(bench, free)
    link_mbit = bench.link_mbit or num_bytes * 8e-3 / _wire_ms(bench, alone, alone["raw_comm_ms"])
    added_ms = _added_ms(bench, alone, 0.0)
    if bench.torchrec:  # of whose steps no parts are known
        return _conditions(bench, link_mbit, added_ms)
    guessed, _ = _calibration_parts(bench, _conditions(bench, link_mbit, added_ms))
    if bench.link_mbit is None:
        took_ms = max(guessed["raw_comm_ms"] - alone["raw_comm_ms"], 1e-3)
        link_mbit *= took_ms / _wire_ms(bench, guessed, alone["raw_comm_ms"])
    return _conditions(bench, link_mbit, _added_ms(bench, guessed, added_ms))


def _calibration_parts(bench: SchedulesBench, conditions: Conditions) -> tuple[dict[str, float], float]:
    """Medians of the step that the shares refer to, and the bytes that it sends."""
    num_micro_batches = bench.calibrate_at or sorted(bench.micro_batches)[len(bench.micro_batches) // 2]
    entry: Entry = ("torchrec_plain", 1, False) if bench.torchrec else ("serial", num_micro_batches, False)
    measured = run_rounds(conditions, [entry], 3, max(4, bench.steps // 2))
    names = ("step_ms", "compute_ms", "raw_lookup_ms", "raw_comm_ms")
    return {n: statistics.median(r[n] for r in measured.rounds[entry]) for n in names}, measured.bytes_sent[entry]


def _added_ms(bench: SchedulesBench, parts: Mapping[str, float], included_ms: float) -> float:
    """The emulated part of a lookup, where the measured one includes some."""
    if bench.lookup_share is None:
        return 0.0
    real_ms = parts["raw_lookup_ms"] - included_ms
    return max(0.0, bench.lookup_share * _compute_ms(bench, parts) - real_ms)


def _compute_ms(bench: SchedulesBench, parts: Mapping[str, float]) -> float:
    return parts["step_ms"] if bench.torchrec else parts["compute_ms"]


def _wire_ms(bench: SchedulesBench, parts: Mapping[str, float], free_ms: float) -> float:
    """What the limit of the links should add to exchanges, which take `free_ms` without: at least half of the share."""
    wanted_ms = bench.comm_share * _compute_ms(bench, parts)
    return max(wanted_ms - free_ms, wanted_ms / 2)


_UNKNOWN = (
    "compute_ms", "raw_lookup_ms", "exposed_lookup_ms", "raw_comm_ms", "exposed_comm_ms", "exposed_dense_ms",
    "exposed_rows_ms", "idle_ms", "copy_ms", "step_over_bound", "exposed_over_raw", "step_over_own_bound",
    "exposed_over_own_raw",
)  # fmt: skip
_PACED = ("load_ms", "route_ms", "fetch_ms", "write_back_ms")


def _conditions(bench: SchedulesBench, link_mbit: float, added_ms: float) -> Conditions:
    """added_ms: emulated lookup of a step."""
    pace = Pace(**dict(zip(_PACED, (s * added_ms for s in bench.lookup_stages), strict=True)))
    link = EmulatedLink(link_mbit, bench.latency_us, bench.fabric_ranks)
    is_timed = is_emulated(bench)
    groups = ParallelConfig(replicas=bench.replicas)
    return Conditions(
        bench.job, bench.ranks, bench.device, link, is_timed, pace, bench.shares_table, groups, bench.replica_sync
    )


def _auto_window(bench: SchedulesBench, conditions: Conditions) -> int:
    """The number of micro-batches that the model of the window chooses after steps with few and with many."""
    entries: list[Entry] = [("nested", n, bench.window_cache[0]) for n in (FEW, MANY)]
    measured = run_rounds(conditions, entries, 1, bench.steps)
    few, many = (
        MeasuredWindow(
            entry[1], *(statistics.median(r[n] for r in measured.rounds[entry]) for n in ("compute_ms", "raw_comm_ms"))
        )
        for entry in entries
    )
    return choose_window(fit_window(few, many), CANDIDATES, overlapped_ms)


def _row(entry: Entry, bench: SchedulesBench, conditions: Conditions, measured: Measured) -> dict[str, Any]:
    rounds = measured.rounds[entry]
    medians = {name: round(statistics.median(part[name] for part in rounds), 3) for name in rounds[0]}
    times = sorted(part["step_ms"] for part in rounds)
    added_ms = sum(getattr(conditions.pace, name) for name in _PACED)
    return {
        "schedule": entry[0],
        "ranks": max(bench.ranks if bench.fabric_ranks == 1 else 1, bench.fabric_ranks),
        "replicas": bench.replicas,
        "micro_batches": entry[1],
        "window_cache": entry[2],
        "device": bench.device,
        "link_mbit": round(conditions.link.mbit, 1),
        "link": "emulated" if is_emulated(bench) else "namespaces",
        "emulated_lookup_ms": round(added_ms, 2),
        **medians,
        "rounds": len(rounds),
        "step_ms_spread": [round(times[0], 2), round(times[-1], 2)],
        "sent_mb": round(measured.bytes_sent[entry] * 1e-6, 3),
        "on_link_mb": round(measured.bytes_on_link[entry] * 1e-6, 3),
        "replica_mb": round(measured.replica_bytes[entry] * 1e-6, 3),
        "collision_rate": round(measured.collision_rate, 4),
        "max_abs_diff": measured.difference[entry],
    }


def _show(rows: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> list[Shown]:
    kinds = {"EMULATED" if row["emulated"] else "real" for row in rows}
    return [(f"schedules over {' and '.join(sorted(kinds))} links, medians", short_rows(rows))]


BENCH = Bench(config=SchedulesBench, measure=measure_schedules, show=_show, is_emulated=is_emulated)
