"""Measure `nestrec prepare` on a large synthetic log: events/s, and the peak memory of a new process.

nestrec bench prepare --events 1000000
"""

import dataclasses
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from nestrec.base.config import config
from nestrec.base.config_values import Count
from nestrec.data.formats.format_registry import prepare
from nestrec.data.formats.log_format import LogOptions
from nestrec.data.prepare.prepare_options import LogColumns
from nestrec.data.synthetic import synthetic_logs as synthetic
from nestrec.report.result_file import write_frame
from nestrec_bench.bench import Bench

MEAN_LENGTH = 136
"""Mean number of events per user of the synthetic log."""
OPTIONS = LogOptions(
    log=LogColumns(time="time_ms", time_unit="ms", actions={name: name for name in synthetic.ACTION_BITS})
)


def measure_prepare(
    num_events: Sequence[int] = (10_000_000,), *, output: Path | None = None, command: str = "", num_items: int = 50_000
) -> list[dict[str, Any]]:
    """Return one row per size of the log; with `output`, also write them as a result file."""
    with tempfile.TemporaryDirectory(prefix="nestrec-bench-") as folder:
        rows = [_measure(Path(folder), size, num_items) for size in num_events]
    if output is not None:
        write_frame(output, bench="prepare", command=command, rows=rows)
    return rows


def _measure(folder: Path, num_events: int, num_items: int) -> dict[str, Any]:
    shape = synthetic.preset("ml-1m-like", num_users=max(1, num_events // MEAN_LENGTH), num_items=num_items)
    log = folder / "log.csv"
    start_s = time.perf_counter()
    written = synthetic.write_csv(dataclasses.replace(shape, name="prepare"), log)
    draw_s = time.perf_counter() - start_s
    # A new process is used because the memory of this one must not count.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        row = pool.submit(_prepare_alone, log, folder / "dataset").result()
    log.unlink()
    return {"events": written, "input_mib": row.pop("input_mib"), "draw_s": round(draw_s, 2), **row}


def _prepare_alone(log: Path, output: Path) -> dict[str, Any]:
    before_mib = peak_memory_mib()
    start_s = time.perf_counter()
    card = prepare("log", log, output, options=dataclasses.replace(OPTIONS, force=True))
    wall_s = time.perf_counter() - start_s
    return {
        "input_mib": round(log.stat().st_size / 2**20, 1),
        "users": card.counts.users,
        "items": card.counts.items,
        "wall_s": round(wall_s, 2),
        "events_per_s": round(card.counts.events / wall_s),
        "peak_memory_mib": round(peak_memory_mib(), 1),
        "memory_after_import_mib": round(before_mib, 1),
    }


def peak_memory_mib() -> float:
    """Return the peak resident memory of this process.

    `getrusage` is not used if /proc exists, because there a spawned process inherits the peak of its parent.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@config
class PrepareBenchConfig:
    events: tuple[int, ...] = (10_000_000,)
    """Number of events of the log; several sizes are measured one after another."""
    items: Count = 50_000
    """Number of items of the log."""


BENCH = Bench(config=PrepareBenchConfig, measure=lambda bench: measure_prepare(bench.events, num_items=bench.items))
