"""Reader of run folders for reports. It tolerates missing and corrupt files of unfinished, killed or damaged runs."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestrec.base.errors import UserError
from nestrec.report.formatting import as_number, mean_of_metric
from nestrec.trace import Span, load_spans

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunRecords:
    """Records of a run folder."""

    folder: Path
    config: Record
    """Resolved config; empty if it is missing or corrupt."""
    versions: Record
    """Versions of the software, and description of the machine."""
    card: Record
    """Dataset card."""
    parameters: Record
    """Numbers of parameters: `dense`, and `tables` with the rows and width of each table."""
    steps: list[Record]
    """Step records, at most one per step, in order."""
    evaluations: list[Record]
    """Evaluation records in order of steps, one per (split, step)."""
    events: list[Record]
    """Events of the run, such as resumes and warnings, in order of time."""
    windows: list[Record]
    """Time windows in order, with the metrics before training on them."""
    spans: list[Span]
    """Spans of the trace; empty if there is no trace."""
    problems: list[str]
    """Messages about files that could not be read."""

    @property
    def name(self) -> str:
        """Name of the folder, because several runs can have the same recipe."""
        return self.folder.resolve().name

    @property
    def recipe(self) -> str:
        return str(self.config.get("name") or "")

    def part(self, part: str) -> list[Record]:
        return [record for record in self.evaluations if record.get("part") == part]


def load_run(folder: Path) -> RunRecords:
    """Read a run folder; corrupt files are skipped and reported in `problems`.

    Raises:
        UserError: The folder is not a run folder.
    """
    if not (folder / "config.json").is_file() and not (folder / "metrics.jsonl").is_file():
        remedy = "use a folder that `nestrec train` wrote, with config.json and metrics.jsonl"
        raise UserError("not a run folder", option="run", value=str(folder), remedy=remedy)
    problems: list[str] = []
    records = _load_records(folder / "metrics.jsonl", problems)
    by_step = {record["step"]: record for record in records if record["kind"] == "step"}
    by_window = {record["window"]: record for record in records if record["kind"] == "window"}
    by_part = {(record["part"], record["step"]): record for record in records if record["kind"] == "evaluation"}
    return RunRecords(
        folder=folder,
        config=_load_object(folder / "config.json", problems),
        versions=_load_object(folder / "versions.json", problems),
        card=_load_object(folder / "card.json", problems),
        parameters=_load_object(folder / "parameters.json", problems),
        # A resumed run repeats the steps since its checkpoint; the later record replaces the earlier one.
        steps=[by_step[step] for step in sorted(by_step)],
        evaluations=sorted(by_part.values(), key=lambda record: record["step"]),
        events=[record for record in records if record["kind"] == "event"],
        windows=[by_window[number] for number in sorted(by_window)],
        spans=_load_trace(folder / "trace.jsonl", problems),
        problems=problems,
    )


def headline_evaluation(run: RunRecords) -> Record | None:
    """Return the newest test result; without one, the best validation result by its main metric."""
    test, valid = run.part("test"), run.part("valid")
    if test:
        return test[-1]
    return max(valid, key=_score) if valid else None


def best_evaluation(run: RunRecords) -> Record | None:
    """Return the best validation result by its main metric."""
    valid = run.part("valid")
    return max(valid, key=_score) if valid else None


def _score(evaluation: Record) -> float:
    score = mean_of_metric(evaluation["metrics"], "model", evaluation["headline"])
    return -math.inf if math.isnan(score) else score


def _load_records(path: Path, problems: list[str]) -> list[Record]:
    if not path.is_file():
        return []
    # A killed process can leave an incomplete line, and the resumed run appends to it.
    lines = [line for line in path.read_text(errors="replace").split("\n") if line.strip()]
    records = [record for record in map(_parse_record, lines) if record is not None]
    num_damaged = len(lines) - len(records)
    if num_damaged:
        problems.append(f"skipped {num_damaged} corrupt line{'s' * (num_damaged > 1)} of metrics.jsonl")
    return records


def _parse_record(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not math.isfinite(as_number(record.get("step"))):
        return None
    well_formed = {
        "step": lambda: isinstance(record.get("parts", {}), dict),
        "evaluation": lambda: (
            isinstance(record.get("part"), str)
            and isinstance(record.get("headline"), str)
            and _is_table(record.get("metrics"))
        ),
        "window": lambda: math.isfinite(as_number(record.get("window"))) and isinstance(record.get("metrics"), dict),
        "event": lambda: isinstance(record.get("text"), str),
    }
    check = well_formed.get(str(record.get("kind")))
    return record if check is not None and check() else None


def _is_table(metrics: Any) -> bool:
    return isinstance(metrics, dict) and all(isinstance(values, dict) for values in metrics.values())


def _load_object(path: Path, problems: list[str]) -> Record:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text())
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        problems.append(f"{path.name} is corrupt")
        return {}
    return value


def _load_trace(path: Path, problems: list[str]) -> list[Span]:
    if not path.is_file():
        return []
    try:
        return load_spans(path)
    except (UserError, ValueError, OSError) as error:
        problems.append(f"{path.name} is corrupt: {error}")
        return []
