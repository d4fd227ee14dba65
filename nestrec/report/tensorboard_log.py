"""TensorBoard logging of a run."""

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch.utils.tensorboard import SummaryWriter

from nestrec.data.samples.time_windows import TimeWindow
from nestrec.report.formatting import as_number
from nestrec.tasks.metrics import ConfidenceInterval
from nestrec.tasks.task import Evaluation
from nestrec.training.callbacks import TrainingCallback

_LOG = logging.getLogger(__name__)
_SCALARS = {
    "loss": "train/loss",
    "learning_rate": "train/learning_rate",
    "samples_per_s": "speed/samples_per_s",
    "tokens_per_s": "speed/tokens_per_s",
    "step_ms": "speed/step_ms",
    "memory_mib": "speed/memory_mib",
    "imbalance": "balance/waiting_at_collectives",
    "straggler": "balance/straggler",
}


class TensorBoardWriter(TrainingCallback):
    """Training callback that writes TensorBoard event files to `folder`.

    Evaluations are also written outside of training. A write error disables the log and does not stop the run.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._has_failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            self._write(writer.close)

    def on_train_start(self, total_steps: int | None, first_step: int) -> None:
        """Open the log and hide later steps of an earlier process, so that a resumed run has no duplicate steps."""

        def start() -> None:
            self._writer = SummaryWriter(str(self._folder), purge_step=first_step + 1)

        self._write(start)

    def on_step_report(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        for name, tag in _SCALARS.items():
            self._scalar(tag, values.get(name), step)
        for part, milliseconds in values.get("parts", {}).items():
            self._scalar(f"step_parts_ms/{part}", milliseconds, step)

    def on_evaluation(self, evaluation: Evaluation, step: int, epoch: int) -> None:
        is_outside_training = self._writer is None
        for system, metrics in evaluation.metrics.items():
            for metric, value in metrics.items():
                self._scalar(f"{evaluation.part}/{metric}/{system}", value.mean, step)
        self._write(lambda: self._open().flush())
        if is_outside_training:
            self.close()

    def on_window_evaluation(self, window: TimeWindow, metrics: Mapping[str, ConfidenceInterval], step: int) -> None:
        for metric, value in metrics.items():
            self._scalar(f"windows/{metric}", value.mean, step)

    def _scalar(self, tag: str, value: Any, step: int) -> None:
        if not math.isnan(number := as_number(value)):
            self._write(lambda: self._open().add_scalar(tag, number, step))

    def _write(self, action: Callable[[], object]) -> None:
        """Run a write; after an error, log a warning and write nothing more, because the log is only a by-product."""
        if self._has_failed:
            return
        try:
            action()
        except OSError as error:
            self._has_failed = True
            _LOG.warning("TensorBoard logging is disabled after a write error: %s", error)

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            self._writer = SummaryWriter(str(self._folder))
        return self._writer
