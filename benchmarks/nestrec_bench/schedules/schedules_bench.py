"""Compare pipeline schedules on the same batches, over limited links between ranks (real links as root, else emulated).

Ranks are processes in network namespaces (see limited_links). With `fabric_ranks`, this process represents one of many
equal ranks, on a CPU or a GPU, and the time of its exchanges is emulated; optionally also that of its lookups. All
schedules run in the same processes and take turns, a round of a few steps each, so that other load on the machine
affects all of them. A round starts and ends with an empty pipeline; its first and last step are ignored. Figures are
medians over rounds on the slowest rank; times of parts come from trace spans and add up to the step.

`step_over_bound` and `exposed_over_raw` compare with the parts of serial at the same partition; the fields with `own`
compare with the parts of the same steps, on which other load has less effect.

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
from nestrec.pipeline.window_cost_model import MeasuredWindow, choose_num_micro_batches, fit_window, overlapped_ms
from nestrec_bench.bench import Bench, OutputPart
from nestrec_bench.harness.delayed_engine import Pace
from nestrec_bench.harness.links import EmulatedLink, can_limit
from nestrec_bench.schedules.rounds import Conditions, Entry, Measurements, run_rounds
from nestrec_bench.schedules.schedules_job import JobConfig
from nestrec_bench.schedules.torchrec_tokens import PREFIX, TORCHREC_SCHEDULES

_UNLIMITED_MBIT = 1e6
_REAL_UNLIMITED_MBIT = 100_000.0


@config
class SchedulesBenchConfig:
    ranks: int = 2
    """Number of processes, each with one compute thread."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Compute device; cuda requires fabric_ranks."""
    link_mbit: float | None = None
    """Bandwidth of each rank's link in Mbit/s, each way. None: communication takes comm_share of compute."""
    emulated: bool = False
    """Whether to emulate the links by waiting instead of limiting real ones; always if network namespaces are not
    available, which the result file records."""
    fabric_ranks: int = 1
    """Number of ranks that an emulated fabric connects, one of which this process represents. 1: no fabric is
    emulated."""
    latency_us: float = 0.0
    """Latency of an exchange over the emulated fabric."""
    comm_share: float = 0.7
    """Total communication as a fraction of compute if link_mbit is not set."""
    lookup_share: float | None = None
    """Total lookup as a fraction of compute; emulated waits are added to the real lookup. None: no waits are added."""
    lookup_stages: tuple[float, ...] = (0.43, 0.02, 0.33, 0.22)
    """Fractions of the stages of an emulated lookup: prefetch and load of samples, key exchange, row reads, row
    writes."""
    calibrate_at: int | None = None
    """Number of micro-batches with which the links are calibrated. None: the median of the compared numbers."""
    micro_batches: tuple[int, ...] = (4, 8)
    """Numbers of micro-batches to compare."""
    auto: bool = False
    """Whether to compare also the number that batch.num_micro_batches=auto chooses."""
    schedules: tuple[str, ...] = ("serial", "stale", "semi_async", "dual_buffer", "frozen_window", "nested", "priority")
    """Pipeline schedules to compare."""
    others_at: int | None = None
    """Number of micro-batches at which schedules other than serial and nested run, without the window cache. None: at
    all numbers."""
    torchrec: bool = False
    """Whether to compare with TorchRec; its communication then takes comm_share of the rest of its step."""
    window_cache: tuple[bool, ...] = (False, True)
    """Settings of the window cache to compare."""
    shares_table: bool = False
    """Whether all schedules use one table, for limited memory; weights are then not compared."""
    replicas: int = 1
    """Number of replica groups of the ranks."""
    replica_sync: ReplicaSyncConfig = ReplicaSyncConfig()
    """Synchronization of the replicas of rows."""
    rounds: int = 7
    """Number of rounds per schedule."""
    steps: int = 8
    """Number of steps per round."""
    max_s: float = 3600.0
    """Seconds of rounds after which no further round starts, except the first one."""
    job: JobConfig = JobConfig()
    """Options of the training job."""


def measure_schedules(bench: SchedulesBenchConfig) -> list[dict[str, Any]]:
    """Return one row per schedule, number of micro-batches and cache setting."""
    _check(bench)
    conditions = _calibrated(bench)
    entries = _entries(bench)
    chosen = _auto_window(bench, conditions) if bench.auto else None
    if chosen is not None:
        entries = list(dict.fromkeys([*entries, *_partition_entries(replace(bench, schedules=("nested",)), chosen)]))
    measured = run_rounds(conditions, entries, bench.rounds, bench.steps, bench.max_s)
    rows = [_row(entry, bench, conditions, measured) for entry in entries]
    _compare(rows)
    if bench.torchrec:
        _compare_with_torchrec(rows, measured)
    for row in rows:
        row["is_auto"] = row["micro_batches"] == chosen
    return rows


def _compare(rows: Sequence[dict[str, Any]]) -> None:
    """Add the ratios to serial and to the bounds."""
    best = min(row["step_ms"] for row in rows if row["schedule"] == "serial" and row["micro_batches"] == 1)
    by_entry = {(row["schedule"], row["micro_batches"], row["window_cache"]): row for row in rows}
    for row in rows:
        row["speedup"] = round(best / row["step_ms"], 3)
        if row["schedule"].startswith(PREFIX):  # the parts of TorchRec's steps are not measured
            row.update(dict.fromkeys(_UNKNOWN))
            continue
        uncached = by_entry["serial", row["micro_batches"], False]
        same = by_entry.get(("serial", row["micro_batches"], row["window_cache"]), uncached)
        bound_ms = same["compute_ms"] + same["raw_comm_ms"] / row["micro_batches"]
        row["step_over_bound"] = round(row["step_ms"] / bound_ms, 3)
        row["exposed_over_raw"] = round(row["exposed_comm_ms"] / max(uncached["raw_comm_ms"], 1e-9), 4)
        own_bound_ms = row["compute_ms"] + row["raw_comm_ms"] / row["micro_batches"]
        row["step_over_own_bound"] = round(row["step_ms"] / own_bound_ms, 3)
        row["exposed_over_own_raw"] = round(row["exposed_comm_ms"] / max(row["raw_comm_ms"], 1e-9), 4)


def _compare_with_torchrec(rows: Sequence[dict[str, Any]], measured: Measurements) -> None:
    """Add `torchrec_ratio`: TorchRec's step, with its faster schedule, divided by that of the row.

    It is a median with quartiles over rounds, and the product of three ratios: the effect of overlap (serial over this
    row), the effect of sending fewer bytes (serial plus the time of the additional bytes of TorchRec, over serial), and
    the rest, which is due to the implementation.
    """
    by_schedule = {row["schedule"]: row for row in rows if row["micro_batches"] == 1}
    fastest = min(TORCHREC_SCHEDULES, key=lambda schedule: float(by_schedule[schedule]["step_ms"]))
    theirs = [r["step_ms"] for r in measured.rounds[fastest, 1, False]]
    serial = by_schedule["serial"]
    serial_ms = serial["step_ms"]
    more_ms = (by_schedule[fastest]["on_link_mb"] - serial["on_link_mb"]) * 8e3 / serial["link_mbit"]
    for row in rows:
        ours = measured.rounds[row["schedule"], row["micro_batches"], row["window_cache"]]
        ratios = [t / own["step_ms"] for t, own in zip(theirs, ours, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        row["torchrec_ratio"] = round(middle, 3)
        row["torchrec_ratio_quartiles"] = [round(low, 3), round(high, 3)]
        row["ratio_of_overlap"] = round(serial_ms / row["step_ms"], 3)
        row["ratio_of_bytes"] = round((serial_ms + more_ms) / serial_ms, 3)
        row["ratio_of_rest"] = round(middle / row["ratio_of_overlap"] / row["ratio_of_bytes"], 3)


def short_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the main columns for a terminal; lookup and communication are exposed/total milliseconds."""
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


def is_emulated(bench: SchedulesBenchConfig) -> bool:
    """Return whether links are emulated, by option or because network namespaces are not available."""
    return bench.emulated or bench.fabric_ranks > 1 or not can_limit()


def _check(bench: SchedulesBenchConfig) -> None:
    if bench.steps < 4:
        problem = "at least 4 steps are required, because the first and the last one are ignored"
        raise UserError(problem, option="steps", value=bench.steps, remedy="set --steps 4")
    if bench.device == "cuda" and bench.fabric_ranks == 1:
        problem = "on a GPU, the fabric must be emulated"
        remedy = "set the number of ranks, one of which this GPU represents, for example --fabric_ranks 16"
        raise UserError(problem, option="fabric_ranks", value=1, remedy=remedy)
    if len(bench.lookup_stages) != 4 or abs(sum(bench.lookup_stages) - 1) > 1e-6:
        problem = "expected four fractions that add up to 1"
        remedy = "set four fractions"
        raise UserError(problem, option="lookup_stages", value=bench.lookup_stages, remedy=remedy)


def _entries(bench: SchedulesBenchConfig) -> list[Entry]:
    """Return the entries: speeds are compared with serial at N = 1, and weights with serial at the same partition."""
    entries: list[Entry] = [("serial", 1, False)]
    entries += [(name, 1, False) for name in TORCHREC_SCHEDULES if bench.torchrec]
    for num_micro_batches in bench.micro_batches:
        entries += _partition_entries(bench, num_micro_batches)
    return list(dict.fromkeys(entries))


def _partition_entries(bench: SchedulesBenchConfig, num_micro_batches: int) -> list[Entry]:
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


def _calibrated(bench: SchedulesBenchConfig) -> Conditions:
    """Calibrate the bandwidth and the waits with which exchanges and lookup take their shares of the computation.

    The first estimate comes from steps without them, and steps under this estimate correct it: a real link takes longer
    than the transfer of its bytes, and a device with idle times between computations computes faster than a busy one.
    """
    fast = _UNLIMITED_MBIT if is_emulated(bench) else _REAL_UNLIMITED_MBIT
    free = _conditions(bench, bench.link_mbit or fast, 0.0)
    if bench.link_mbit is not None and bench.lookup_share is None:
        return free
    alone, num_bytes = _calibration_parts(bench, free)
    link_mbit = bench.link_mbit or num_bytes * 8e-3 / _wire_ms(bench, alone, alone["raw_comm_ms"])
    added_ms = _added_ms(bench, alone, 0.0)
    if bench.torchrec:  # the parts of TorchRec's steps are not measured
        return _conditions(bench, link_mbit, added_ms)
    estimated, _ = _calibration_parts(bench, _conditions(bench, link_mbit, added_ms))
    if bench.link_mbit is None:
        measured_ms = max(estimated["raw_comm_ms"] - alone["raw_comm_ms"], 1e-3)
        link_mbit *= measured_ms / _wire_ms(bench, estimated, alone["raw_comm_ms"])
    return _conditions(bench, link_mbit, _added_ms(bench, estimated, added_ms))


def _calibration_parts(bench: SchedulesBenchConfig, conditions: Conditions) -> tuple[dict[str, float], float]:
    """Return the medians of the step to which the shares refer, and the bytes that it sends."""
    num_micro_batches = bench.calibrate_at or sorted(bench.micro_batches)[len(bench.micro_batches) // 2]
    entry: Entry = ("torchrec_plain", 1, False) if bench.torchrec else ("serial", num_micro_batches, False)
    measured = run_rounds(conditions, [entry], 3, max(4, bench.steps // 2))
    names = ("step_ms", "compute_ms", "raw_lookup_ms", "raw_comm_ms")
    return {n: statistics.median(r[n] for r in measured.rounds[entry]) for n in names}, measured.bytes_sent[entry]


def _added_ms(bench: SchedulesBenchConfig, parts: Mapping[str, float], included_ms: float) -> float:
    """Return the emulated milliseconds of a lookup; the measured lookup already contains `included_ms` of them."""
    if bench.lookup_share is None:
        return 0.0
    real_ms = parts["raw_lookup_ms"] - included_ms
    return max(0.0, bench.lookup_share * _compute_ms(bench, parts) - real_ms)


def _compute_ms(bench: SchedulesBenchConfig, parts: Mapping[str, float]) -> float:
    return parts["step_ms"] if bench.torchrec else parts["compute_ms"]


def _wire_ms(bench: SchedulesBenchConfig, parts: Mapping[str, float], free_ms: float) -> float:
    """Return the milliseconds that limited links should add to exchanges: at least half of their share.

    Args:
        bench: Options with the share.
        parts: Parts of the step to which the share refers.
        free_ms: Milliseconds of the exchanges without limited links.
    """
    target_ms = bench.comm_share * _compute_ms(bench, parts)
    return max(target_ms - free_ms, target_ms / 2)


_UNKNOWN = (
    "compute_ms", "raw_lookup_ms", "exposed_lookup_ms", "raw_comm_ms", "exposed_comm_ms", "exposed_dense_ms",
    "exposed_rows_ms", "idle_ms", "copy_ms", "step_over_bound", "exposed_over_raw", "step_over_own_bound",
    "exposed_over_own_raw",
)  # fmt: skip
_PACED = ("load_ms", "route_ms", "fetch_ms", "write_back_ms")


def _conditions(bench: SchedulesBenchConfig, link_mbit: float, added_ms: float) -> Conditions:
    """Return the conditions with a bandwidth and the emulated lookup milliseconds of a step."""
    pace = Pace(**dict(zip(_PACED, (s * added_ms for s in bench.lookup_stages), strict=True)))
    link = EmulatedLink(link_mbit, bench.latency_us, bench.fabric_ranks)
    return Conditions(
        job=bench.job,
        ranks=bench.ranks,
        device=bench.device,
        link=link,
        is_emulated=is_emulated(bench),
        pace=pace,
        shares_table=bench.shares_table,
        groups=ParallelConfig(num_replicas=bench.replicas),
        replica_sync=bench.replica_sync,
    )


def _auto_window(bench: SchedulesBenchConfig, conditions: Conditions) -> int:
    """Return the number of micro-batches that the window cost model chooses after steps with few and with many."""
    entries: list[Entry] = [("nested", n, bench.window_cache[0]) for n in (FEW, MANY)]
    measured = run_rounds(conditions, entries, 1, bench.steps)
    few, many = (
        MeasuredWindow(
            entry[1], *(statistics.median(r[n] for r in measured.rounds[entry]) for n in ("compute_ms", "raw_comm_ms"))
        )
        for entry in entries
    )
    return choose_num_micro_batches(fit_window(few, many), CANDIDATES, overlapped_ms)


def _row(entry: Entry, bench: SchedulesBenchConfig, conditions: Conditions, measured: Measurements) -> dict[str, Any]:
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


def _show(rows: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> list[OutputPart]:
    kinds = {"EMULATED" if row["emulated"] else "real" for row in rows}
    return [(f"schedules over {' and '.join(sorted(kinds))} links, medians", short_rows(rows))]


BENCH = Bench(config=SchedulesBenchConfig, measure=measure_schedules, show=_show, is_emulated=is_emulated)
