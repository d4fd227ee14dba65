"""Steps of overlapping schedules predicted from the serial rows of a result file of `nestrec bench schedules`.

The serial row of a partition says what computation, lookup and communication take when nothing overlaps; the simulator
says what a schedule makes of them. For files from machines that are not here, such as a GPU with an emulated fabric.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from nestrec.base.errors import UserError
from nestrec.bench.planning.prediction import BOUND_MEDIAN, BOUND_WORST
from nestrec.bench.schedules.schedules import SchedulesBench
from nestrec.pipeline import PipelineConfig
from nestrec.planning.papers.comparison import SameOnEveryRank
from nestrec.planning.simulator.rehearsal import rehearse
from nestrec.planning.simulator.replay import Mesh, replay

_STEPS = 8
LOOKUP_STAGES = SchedulesBench().lookup_stages
"""How the lookup divides: the bench says so for the part of it that it emulates."""
_SAME = ("ranks", "micro_batches", "window_cache", "link_mbit")


def predict_rows(rows: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row for each schedule with a serial twin, and the errors."""
    serial = {_place(row): row for row in rows if row["schedule"] == "serial"}
    found = [_row(row, serial[_place(row)]) for row in rows if row["schedule"] != "serial" and _place(row) in serial]
    if not found:
        remedy = "give a file with serial and other schedules at the same partition"
        raise UserError("nothing to predict", field="rows", value=len(rows), remedy=remedy)
    errors = [abs(row["error"]) for row in found]
    within = statistics.median(errors) <= BOUND_MEDIAN and all(abs(row["error"]) <= row["bound"] for row in found)
    summary = {
        "configurations": len(found) + len(serial),
        "used_to_fit": len(serial),
        "tested": len(found),
        "median_error": round(statistics.median(errors), 4),
        "largest_error": round(max(errors), 4),
        "is_within": within,
    }
    return found, summary


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in _SAME)


def _row(row: Mapping[str, Any], serial: Mapping[str, Any]) -> dict[str, Any]:
    predicted = _predicted_ms(row, serial)
    low, high = row.get("step_ms_spread", (row["step_ms"], row["step_ms"]))
    spread = (high - low) / 2 / row["step_ms"]
    return {
        "schedule": row["schedule"],
        **{name: row.get(name) for name in _SAME},
        "measured_ms": row["step_ms"],
        "predicted_ms": round(predicted, 3),
        "error": round(predicted / row["step_ms"] - 1.0, 4),
        "spread": round(spread, 4),
        "bound": round(max(BOUND_WORST, 2 * spread), 4),
    }


def _predicted_ms(row: Mapping[str, Any], serial: Mapping[str, Any]) -> float:
    """What does not overlap in the serial step and has no kind (idle) stays with the computation."""
    parts = serial["micro_batches"]
    compute = serial["compute_ms"] + serial["idle_ms"]
    exchange, lookup = serial["raw_comm_ms"] / (2 * parts), serial["raw_lookup_ms"]
    loaded, keys, read, written = (lookup * part for part in LOOKUP_STAGES)
    seconds = {
        "forward_backward": compute / parts,
        "exchange_vectors": exchange,
        "exchange_gradients": exchange,
        "deduplicate": loaded,
        "exchange_keys": keys,
        "fetch": read,
        "read_ahead": read,
        "write_back": written,
    }
    options = PipelineConfig(schedule=row["schedule"], window_cache=bool(row.get("window_cache")))
    program = rehearse(options, micro_batches=parts, steps=_STEPS)
    return float(replay(program, SameOnEveryRank(seconds), Mesh(1, max(1, row["ranks"]))).step_s()[0])
