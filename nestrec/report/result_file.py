"""Result files of benchmarks: the command, machine, date and rows of results, as JSON."""

import datetime
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from nestrec.base.errors import UserError
from nestrec.base.files import check_file, write_atomic
from nestrec.base.thread_team import usable_cores


def describe_hardware() -> dict[str, Any]:
    """Return the hardware and the software versions that results depend on."""
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": devices,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
    }


def cpu_name() -> str:
    """Return the model name of the CPU."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def load_frame(path: Path) -> dict[str, Any]:
    """Read a result file that a benchmark wrote."""
    try:
        frame: dict[str, Any] = json.loads(path.read_text())
        if isinstance(frame, dict) and "rows" in frame:
            return frame
        problem = "it does not contain rows"
    except (OSError, ValueError) as error:
        problem = str(error)
    remedy = "use files that `nestrec bench ... --json FILE` wrote"
    raise UserError(f"not a result file: {problem}", option="FILE", value=str(path), remedy=remedy)


def make_frame(
    *,
    bench: str,
    command: str,
    rows: Sequence[Mapping[str, Any]],
    emulated: bool = False,
    measured_on: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of a result file.

    Args:
        bench: Name of the benchmark.
        command: Command line that was run.
        rows: Results.
        emulated: Whether a device or link was emulated.
        measured_on: Description of the machine; this machine by default.
    """
    return {
        "bench": bench,
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": dict(measured_on) if measured_on is not None else describe_hardware(),
        "emulated": emulated,
        "rows": [dict(row) for row in rows],
    }


def join_frames(frames: Sequence[Mapping[str, Any]], *, bench: str, command: str) -> dict[str, Any]:
    """Merge the results of several commands into one file.

    `runs` of the result contains the metadata of each command, and `run` of each row is the index of its command. Other
    lists of rows are merged in the same way. Frames can be results of `join_frames` themselves.
    """
    lists: dict[str, list[dict[str, Any]]] = {"rows": []}
    runs: list[dict[str, Any]] = []
    for frame in frames:
        own = {key: value for key, value in frame.items() if key != "runs" and _are_rows(value)}
        for key, rows in own.items():
            numbered = [{**row, "run": len(runs) + (row["run"] if "runs" in frame else 0)} for row in rows]
            lists[key] = lists.get(key, []) + numbered
        runs += frame.get("runs") or [{key: value for key, value in frame.items() if key not in own}]
    emulated = any(frame["emulated"] for frame in frames)
    joined = make_frame(
        bench=bench, command=command, rows=lists["rows"], emulated=emulated, measured_on={"see": "runs"}
    )
    return {**joined, **lists, "runs": runs}


def _are_rows(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(row, dict) for row in value)


def save_frame(path: Path, frame: Mapping[str, Any]) -> None:
    """Write a result file atomically."""
    check_file(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(frame, indent=2) + "\n", durable=False)


def write_frame(
    path: Path, *, bench: str, command: str, rows: Sequence[Mapping[str, Any]], emulated: bool = False
) -> dict[str, Any]:
    """Write a result file of this machine and return its content."""
    frame = make_frame(bench=bench, command=command, rows=rows, emulated=emulated)
    save_frame(path, frame)
    return frame
