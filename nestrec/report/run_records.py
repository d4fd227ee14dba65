"""What a run folder holds, read so that a page can be made of whatever is there: runs are young, killed or damaged."""

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
    """A run folder in memory."""

    folder: Path
    config: Record
    """resolved config; empty where it is missing or damaged"""
    versions: Record
    """of the software and the machine"""
    card: Record
    """dataset card"""
    parameters: Record
    """how many the model has: `dense`, and `tables` with the rows and width of each"""
    steps: list[Record]
    """step records, one for each step, in order"""
    evaluations: list[Record]
    """evaluation records in order of steps, one for each (part, step)"""
    events: list[Record]
    """events in the order in which they happened"""
    windows: list[Record]
    """of time, in order, each as it was predicted before it was trained on"""
    spans: list[Span]
    """trace, where there is one"""
    problems: list[str]
    """what could not be read, for people"""

    @property
    def name(self) -> str:
        """Of the folder: runs of one recipe are told apart by where they are."""
        return self.folder.resolve().name

    @property
    def recipe(self) -> str:
        return str(self.config.get("name") or "")

    def part(self, part: str) -> list[Record]:
        return [record for record in self.evaluations if record.get("part") == part]


def load_run(folder: Path) -> RunRecords:
    """Read a run folder; whatever is damaged is left out and named in `problems`."""
    if not (folder / "config.json").is_file() and not (folder / "metrics.jsonl").is_file():
        remedy = "name a folder that `nestrec train` wrote: it holds config.json and metrics.jsonl"
        raise UserError("is not a run folder", option="run", value=str(folder), remedy=remedy)
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
        # A resumed run repeats the steps since its checkpoint: the later record stands.
        steps=[by_step[step] for step in sorted(by_step)],
        evaluations=sorted(by_part.values(), key=lambda record: record["step"]),
        events=[record for record in records if record["kind"] == "event"],
        windows=[by_window[number] for number in sorted(by_window)],
        spans=_load_trace(folder / "trace.jsonl", problems),
        problems=problems,
    )


def headline_evaluation(run: RunRecords) -> Record | None:
    """The newest test result, or before there is one the best validation result by its headline metric."""
    test, valid = run.part("test"), run.part("valid")
    if test:
        return test[-1]
    return max(valid, key=_score) if valid else None


def best_evaluation(run: RunRecords) -> Record | None:
    """The best validation result by its headline metric."""
    valid = run.part("valid")
    return max(valid, key=_score) if valid else None


def _score(evaluation: Record) -> float:
    score = mean_of_metric(evaluation["metrics"], "model", evaluation["headline"])
    return -math.inf if math.isnan(score) else score


def _load_records(path: Path, problems: list[str]) -> list[Record]:
    if not path.is_file():
        return []
    # A kill can leave half a line, and the resumed run may have written on behind it.
    lines = [line for line in path.read_text(errors="replace").split("\n") if line.strip()]
    records = [record for record in map(_parse_record, lines) if record is not None]
    num_damaged = len(lines) - len(records)
    if num_damaged:
        problems.append(f"{num_damaged} damaged line{'s' * (num_damaged > 1)} of metrics.jsonl skipped")
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
        problems.append(f"{path.name} is damaged")
        return {}
    return value


def _load_trace(path: Path, problems: list[str]) -> list[Span]:
    if not path.is_file():
        return []
    try:
        return load_spans(path)
    except (UserError, ValueError, OSError) as error:
        problems.append(f"{path.name} is damaged: {error}")
        return []
