"""The folder of a run: resolved config, versions, metrics as JSON lines, evaluations, checkpoints."""

import contextlib
import fcntl
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nestrec
from nestrec.base.config import dumps, leaves, standard_json
from nestrec.base.config_values import from_plain
from nestrec.base.errors import UserError, UserErrorGroup
from nestrec.base.files import remove_partials, write_atomic
from nestrec.checkpoint.checkpoint_manifest import committed_steps
from nestrec.data.dataset import Dataset
from nestrec.data.samples.time_windows import TimeWindow
from nestrec.embedding import TableConfig
from nestrec.tasks.metrics import ConfidenceInterval
from nestrec.tasks.task import Evaluation
from nestrec.trace import Span, save_spans, write_perfetto
from nestrec.training.run_config import RunConfig
from nestrec.training.run_identity import Identity, read_kept
from nestrec.training.state import LostProgress, StepProgressFile

_IDENTITY_FILE = "identity.json"
_BEGINNING_FILE = "beginning.json"
FOLLOWING_FILE = "following.json"
_REMEDY = "free disk space or mend permissions and start again (it goes on from the last checkpoint), or name --output"


class RunFolder:
    """Written by rank 0 only; every rank may read.

    What cannot be written is not raised at once: rank 0 would end alone, and the others hear only that it is lost.
    `check` raises it, where all ranks listen.
    """

    def __init__(self, path: Path, *, is_writer: bool = True):
        self.path = path
        self._is_writer = is_writer
        self._problem: UserError | None = None
        self._marks = StepProgressFile(path / "progress")

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def best(self) -> Path:
        return self.path / "best"

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @contextlib.contextmanager
    def naming_config(self) -> Iterator[None]:
        """Name config.json in errors about its options inside the block: they were not typed by the user."""
        try:
            yield
        except UserError as error:
            options = leaves(self.config()) if error.option and not isinstance(error, UserErrorGroup) else {}
            if any(option == error.option or option.startswith(f"{error.option}.") for option in options):
                error.add_to_problem(f" (set in {self.config_file})")
            raise

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @contextlib.contextmanager
    def kept_to_itself(self) -> Iterator[None]:
        """Refuse a second process that would write here while the block lasts; the kernel ends it with the process."""
        if not self._is_writer:
            yield
            return
        self._write(lambda: self.path.mkdir(parents=True, exist_ok=True))
        self.check()
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            self._lock(descriptor)
            yield
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            remedy = "wait for it, stop it, or train into another folder (--output)"
            problem = "is being trained by another process"
            raise UserError(problem, option="RUN", value=str(self.path), remedy=remedy) from None
        except OSError:
            return  # a file system without locks

    def check(self) -> None:
        """Raise a UserError where something could not be written."""
        if self._problem is not None:
            raise self._problem

    def _write(self, action: Callable[[], object]) -> None:
        """On rank 0, and only until something could not be written."""
        if not self._is_writer or self._problem is not None:
            return
        try:
            action()
        except OSError as error:
            self._problem = UserError(
                f"cannot be written: {error.strerror or error}",
                option="RUN",
                value=str(error.filename or self.path),
                remedy=_REMEDY,
            )

    def begin(self, cfg: RunConfig, card_text: str, device: torch.device) -> None:
        """Write what is known at the start."""

        def write() -> None:
            self.path.mkdir(parents=True, exist_ok=True)
            remove_partials(self.path)
            for path in self.path.glob("*.partial"):  # the temporary names that earlier versions used
                path.unlink()
            write_atomic(self.config_file, dumps(cfg))
            write_atomic(self.path / "card.json", card_text)
            write_atomic(self.path / "versions.json", standard_json(versions(device), indent=2))

        self._write(write)

    def write_card(self, dataset: Dataset) -> None:
        """The data that the run is on from here on."""
        self._write(lambda: write_atomic(self.path / "card.json", dumps(dataset.card) + "\n"))

    def identity(self) -> Identity | None:
        """What the run is called and how it went, or none where nobody has begun it yet."""
        file = self.path / _IDENTITY_FILE
        return read_kept(file, Identity.from_plain) if file.exists() else None

    def name(self, identity: Identity) -> None:
        """Write what the run is called and how it goes on."""
        text = standard_json(identity.to_plain(), indent=1)
        self._write(lambda: write_atomic(self.path / _IDENTITY_FILE, text))

    def began_from(self) -> str | None:
        """The run that this one was begun from, as it was called; none where it began anew, or was not begun yet."""
        file = self.path / _BEGINNING_FILE
        return read_kept(file, lambda plain: str(plain["run"])) if file.exists() else None

    def write_following(self, plain: dict[str, Any]) -> None:
        """From where the run follows a stream."""
        self._write(lambda: write_atomic(self.path / FOLLOWING_FILE, standard_json(plain, indent=1)))

    def write_beginning(self, plain: dict[str, Any]) -> None:
        """What the run was begun from."""
        self._write(lambda: write_atomic(self.path / _BEGINNING_FILE, standard_json(plain, indent=1)))

    def config(self) -> RunConfig:
        file = self.config_file
        if not file.exists():
            raise UserError(
                "is not the folder of a run",
                option="RUN",
                value=str(self.path),
                remedy="name a folder that `nestrec train` wrote",
            )
        return read_kept(file, partial(from_plain, RunConfig))

    def resumed_config(self) -> RunConfig | None:
        """With what the run was last started, where it has saved anything."""
        has_any = [bool(committed_steps(folder)) for folder in (self.checkpoints, self.best)]
        is_saved = any(has_any) or any(self.checkpoints.glob("step-*"))  # one that is half written was of this run, too
        return self.config() if is_saved and self.config_file.exists() else None

    def record(self, kind: str, **values: Any) -> None:
        """Append a line to metrics.jsonl."""

        def append() -> None:
            with self.metrics.open("a") as lines:
                lines.write(standard_json({"kind": kind, **values}) + "\n")

        self._write(append)

    def reached(self, step: int, *, is_mark: bool = False) -> None:
        """A step is over. is_mark: a later start may go on from it."""
        self._write(lambda: self._marks.mark(step) if is_mark else self._marks.reached(step))

    def close(self) -> None:
        """Give back the file of steps; nothing is written after it."""
        self._marks.close()

    def lost_after(self, step: int) -> LostProgress | None:
        """What earlier starts have trained beyond the step that this one goes on from. Known to the writer."""
        lost: list[LostProgress | None] = [None]
        self._write(lambda: lost.append(self._marks.lost(step)))
        return lost[-1]

    def forget_after(self, step: int) -> None:
        """Drop lines of steps after the one that is resumed from: they will be written again."""

        def rewrite() -> None:
            if self.metrics.exists():
                kept = [line for line in self.metrics.read_bytes().splitlines() if _step_of(line) <= step]
                write_atomic(self.metrics, b"".join(line + b"\n" for line in kept))

        self._write(rewrite)

    def write_trace(self, spans: Sequence[Span]) -> None:
        """What the lanes of all ranks did: for the report, and as a file for ui.perfetto.dev."""
        self._write(lambda: save_spans(self.path / "trace.jsonl", spans))
        self._write(lambda: write_perfetto(self.path / "trace.perfetto.json", spans))

    def write_parameters(self, dense: int, tables: Sequence[TableConfig]) -> None:
        """How large the model is; a dynamic table has no number of rows."""
        of_tables = {table.name: {"rows": table.num_rows, "dim": table.dim} for table in tables}
        text = standard_json({"dense": dense, "tables": of_tables}, indent=2)
        self._write(lambda: write_atomic(self.path / "parameters.json", text))

    def write_window(self, window: TimeWindow, metrics: Mapping[str, ConfidenceInterval], step: int) -> None:
        """A line in metrics.jsonl: how the weights after a step saw a window that they had not been trained on."""
        values = {name: [value.mean, value.low, value.high] for name, value in metrics.items()}
        self.record(
            "window",
            step=step,
            window=window.number,
            from_ms=window.from_ms,
            to_ms=window.to_ms,
            events=window.num_events,
            metrics=values,
        )

    def write_evaluation(self, evaluation: Evaluation, step: int, epoch: int) -> None:
        """A line in metrics.jsonl, and the values of each user under eval/."""
        self.record("evaluation", step=step, epoch=epoch, **evaluation.to_plain())

        def write() -> None:
            folder = self.path / "eval"
            folder.mkdir(exist_ok=True)
            np.savez_compressed(folder / f"{evaluation.part}.npz", allow_pickle=False, **evaluation.details)
            (folder / f"{evaluation.part}.json").write_text(
                standard_json({"step": step, **evaluation.to_plain()}, indent=2)
            )

        self._write(write)


def read_evaluation(file: Path) -> dict[str, Any]:
    """Returns what RUN/eval holds of a part; a number that is null there is NaN."""
    found: dict[str, Any] = _with_nan(json.loads(file.read_text()))
    return found


def _with_nan(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {name: _with_nan(value) for name, value in plain.items()}
    return [math.nan if value is None else value for value in plain] if isinstance(plain, list) else plain


def versions(device: torch.device) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    return {
        "nestrec": nestrec.__version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine(),
        "cpu_count": os.cpu_count(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["nestrec", *sys.argv[1:]]),
    }


def _step_of(line: bytes) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return sys.maxsize  # a line cut off by a crash
