"""A run for TensorBoard."""

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
    """Writes what it hears into `folder`. An evaluation may also come before or after training."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._is_lost = False

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

    def started(self, total_steps: int | None, first_step: int) -> None:
        """Steps after `first_step` that an earlier process wrote are hidden, so that a resumed run shows none twice."""

        def start() -> None:
            self._writer = SummaryWriter(str(self._folder), purge_step=first_step + 1)

        self._write(start)

    def stepped(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        for name, tag in _SCALARS.items():
            self._scalar(tag, values.get(name), step)
        for part, milliseconds in values.get("parts", {}).items():
            self._scalar(f"step_parts_ms/{part}", milliseconds, step)

    def evaluated(self, evaluation: Evaluation, step: int, epoch: int) -> None:
        is_alone = self._writer is None
        for system, metrics in evaluation.metrics.items():
            for metric, value in metrics.items():
                self._scalar(f"{evaluation.part}/{metric}/{system}", value.mean, step)
        self._write(lambda: self._open().flush())
        if is_alone:
            self.close()

    def predicted(self, window: TimeWindow, metrics: Mapping[str, ConfidenceInterval], step: int) -> None:
        for metric, value in metrics.items():
            self._scalar(f"windows/{metric}", value.mean, step)

    def _scalar(self, tag: str, value: Any, step: int) -> None:
        if not math.isnan(number := as_number(value)):
            self._write(lambda: self._open().add_scalar(tag, number, step))

    def _write(self, action: Callable[[], object]) -> None:
        """A by-product: where it cannot be written it is left, and the run goes on or says itself what is wrong."""
        if self._is_lost:
            return
        try:
            action()
        except OSError as error:
            self._is_lost = True
            _LOG.warning("nothing more is written for TensorBoard: %s", error)

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            self._writer = SummaryWriter(str(self._folder))
        return self._writer
