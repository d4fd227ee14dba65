"""The folder of a run: resolved config, software versions, metrics (JSON lines), evaluations and checkpoints."""

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
from nestrec.training.run_identity import Identity, read_run_file
from nestrec.training.state import LostProgress, StepProgressFile

_IDENTITY_FILE = "identity.json"
_BEGINNING_FILE = "beginning.json"
STREAM_START_FILE = "following.json"
_REMEDY = (
    "free disk space or fix the permissions and run the command again, which resumes from the last checkpoint; or set "
    "another --output"
)


class RunFolder:
    """Reads and writes the folder of a run; only rank 0 writes.

    A failed write does not raise immediately, because then only rank 0 would exit and the other ranks would report a
    lost peer. `check` raises the error; call it through a collective such as `run_on_first_rank`.
    """

    def __init__(self, path: Path, *, is_writer: bool = True):
        self.path = path
        self._is_writer = is_writer
        self._problem: UserError | None = None
        self._marks = StepProgressFile(path / "progress")

    @property
    def checkpoints(self) -> Path:
        """Folder of the latest checkpoints."""
        return self.path / "checkpoints"

    @property
    def best(self) -> Path:
        """Folder of the checkpoint with the best validation score."""
        return self.path / "best"

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @contextlib.contextmanager
    def naming_config_file(self) -> Iterator[None]:
        """Add the path of config.json to errors about options that come from it, because the user did not type them."""
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
    def locked(self) -> Iterator[None]:
        """Hold an exclusive lock (flock) on the folder inside the block; the kernel releases it if the process dies.

        Raises:
            UserError: If another process is training this run.
        """
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
            remedy = "wait for that process, stop it, or train into another folder (--output)"
            problem = "another process is training this run"
            raise UserError(problem, option="RUN", value=str(self.path), remedy=remedy) from None
        except OSError:
            return  # a file system without locks

    def check(self) -> None:
        """Raise a UserError if a write has failed."""
        if self._problem is not None:
            raise self._problem

    def _write(self, action: Callable[[], object]) -> None:
        """Run a write action on rank 0; after the first failure, skip all further writes."""
        if not self._is_writer or self._problem is not None:
            return
        try:
            action()
        except OSError as error:
            self._problem = UserError(
                f"cannot write: {error.strerror or error}",
                option="RUN",
                value=str(error.filename or self.path),
                remedy=_REMEDY,
            )

    def write_start_files(self, cfg: RunConfig, card_text: str, device: torch.device) -> None:
        """Write the config, the dataset card and the software versions at the start of a run."""

        def write() -> None:
            self.path.mkdir(parents=True, exist_ok=True)
            remove_partials(self.path)
            for path in self.path.glob("*.partial"):  # temporary names of earlier releases
                path.unlink()
            write_atomic(self.config_file, dumps(cfg))
            write_atomic(self.path / "card.json", card_text)
            write_atomic(self.path / "versions.json", standard_json(software_versions(device), indent=2))

        self._write(write)

    def write_card(self, dataset: Dataset) -> None:
        """Write the card of the dataset generation that the run is trained on."""
        self._write(lambda: write_atomic(self.path / "card.json", dumps(dataset.card) + "\n"))

    def identity(self) -> Identity | None:
        """Return the identity of the run; None for a new folder."""
        file = self.path / _IDENTITY_FILE
        return read_run_file(file, Identity.from_plain) if file.exists() else None

    def write_identity(self, identity: Identity) -> None:
        """Write the identity of the run."""
        text = standard_json(identity.to_plain(), indent=1)
        self._write(lambda: write_atomic(self.path / _IDENTITY_FILE, text))

    def warm_start_source(self) -> str | None:
        """Return the run folder that this run was warm-started from; None if it was not, or for a new folder."""
        file = self.path / _BEGINNING_FILE
        return read_run_file(file, lambda plain: str(plain["run"])) if file.exists() else None

    def write_stream_start(self, plain: dict[str, Any]) -> None:
        """Write the stream source and the dataset generation that online training started from."""
        self._write(lambda: write_atomic(self.path / STREAM_START_FILE, standard_json(plain, indent=1)))

    def write_warm_start(self, plain: dict[str, Any]) -> None:
        """Write the run that this run was warm-started from."""
        self._write(lambda: write_atomic(self.path / _BEGINNING_FILE, standard_json(plain, indent=1)))

    def config(self) -> RunConfig:
        """Return the config of the run.

        Raises:
            UserError: If the folder is not the folder of a run.
        """
        file = self.config_file
        if not file.exists():
            raise UserError(
                "the folder does not contain a run",
                option="RUN",
                value=str(self.path),
                remedy="use a folder that `nestrec train` wrote",
            )
        return read_run_file(file, partial(from_plain, RunConfig))

    def resumed_config(self) -> RunConfig | None:
        """Return the config of the last start if the run has a checkpoint, otherwise None."""
        has_any = [bool(committed_steps(folder)) for folder in (self.checkpoints, self.best)]
        is_saved = any(has_any) or any(self.checkpoints.glob("step-*"))  # incomplete checkpoints count too
        return self.config() if is_saved and self.config_file.exists() else None

    def record(self, kind: str, **values: Any) -> None:
        """Append a line to metrics.jsonl."""

        def append() -> None:
            with self.metrics.open("a") as lines:
                lines.write(standard_json({"kind": kind, **values}) + "\n")

        self._write(append)

    def record_progress(self, step: int, *, is_resume_point: bool = False) -> None:
        """Write the last finished step; `is_resume_point` marks a step that a checkpoint is saved at."""
        self._write(lambda: self._marks.record_resume_point(step) if is_resume_point else self._marks.record_step(step))

    def close(self) -> None:
        """Close the progress file; nothing can be written afterwards."""
        self._marks.close()

    def lost_progress_after(self, step: int) -> LostProgress | None:
        """Return the progress of earlier starts after the step that this start resumes from; only on rank 0."""
        lost: list[LostProgress | None] = [None]
        self._write(lambda: lost.append(self._marks.lost_progress(step)))
        return lost[-1]

    def drop_metrics_after(self, step: int) -> None:
        """Remove metrics of steps after the one that the run resumes from; they will be written again."""

        def rewrite() -> None:
            if self.metrics.exists():
                remaining = [line for line in self.metrics.read_bytes().splitlines() if _step_of(line) <= step]
                write_atomic(self.metrics, b"".join(line + b"\n" for line in remaining))

        self._write(rewrite)

    def write_trace(self, spans: Sequence[Span]) -> None:
        """Write the trace of all ranks, for reports and as a file for ui.perfetto.dev."""
        self._write(lambda: save_spans(self.path / "trace.jsonl", spans))
        self._write(lambda: write_perfetto(self.path / "trace.perfetto.json", spans))

    def write_parameters(self, dense: int, tables: Sequence[TableConfig]) -> None:
        """Write the number of dense weights and the table sizes; dynamic tables have no fixed number of rows."""
        of_tables = {table.name: {"rows": table.num_rows, "dim": table.dim} for table in tables}
        text = standard_json({"dense": dense, "tables": of_tables}, indent=2)
        self._write(lambda: write_atomic(self.path / "parameters.json", text))

    def write_window(self, window: TimeWindow, metrics: Mapping[str, ConfidenceInterval], step: int) -> None:
        """Append the metrics of a time window, measured before training on it, to metrics.jsonl."""
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
        """Append an evaluation to metrics.jsonl and write the values per user or event to eval/."""
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
    """Read an evaluation from RUN/eval; JSON null is converted to NaN."""
    evaluation: dict[str, Any] = _with_nan(json.loads(file.read_text()))
    return evaluation


def _with_nan(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {name: _with_nan(value) for name, value in plain.items()}
    return [math.nan if value is None else value for value in plain] if isinstance(plain, list) else plain


def software_versions(device: torch.device) -> dict[str, Any]:
    """Return the versions of nestrec, PyTorch and Python, the device, and the command line."""
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
        return sys.maxsize  # a line truncated by a crash
