"""How fast a run goes: totals read a step late, so that the device is never waited for."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil
import torch

from nestrec.base.clock import Clock, RealClock
from nestrec.base.errors import NonFiniteError
from nestrec.data.batches import Batch
from nestrec.pipeline import Totals
from nestrec.trace import Span


@dataclass
class Meter:
    """Watches losses and rows, and counts samples and tokens between two reports."""

    clock: Clock = field(default_factory=RealClock)
    tables: Sequence[str] = ()
    """names of the tables whose rows the totals tell of"""
    loss: float = float("nan")
    wants_stop: bool = False
    _pending: tuple[int, Totals] | None = None
    _samples: int = 0
    _tokens: int = 0
    _steps: int = 0
    _since_s: float = 0.0

    def start(self) -> None:
        self._since_s = self.clock.now_s()

    def watch(self, step: int, batch: Batch, totals: Totals) -> None:
        """Take the totals of a step; those of the step before are read now."""
        self.flush()
        self._pending = (step, totals)
        self._samples += len(batch.global_samples)
        self._tokens += sum(part.num_tokens for part in batch.micro_batches)
        self._steps += 1

    def flush(self) -> None:
        """Read what is pending; a loss, a gradient or rows that are not finite end the run."""
        if self._pending is None:
            return
        step, totals = self._pending
        self._pending = None
        numbers = torch.stack([totals.loss, totals.gradient_norm.double(), totals.wants_stop])
        loss, norm, stop, *rows = torch.cat([numbers, totals.rows.to(numbers)]).tolist()
        if not (abs(loss) < float("inf") and norm < float("inf")):
            raise NonFiniteError(
                f"loss {loss}, gradient norm {norm} at step {step}: the run stops, the last checkpoint is intact",
                field="step",
                value=step,
                remedy="resume with a smaller learning rate, or look at this step's samples",
            )
        if bad := [name for name, seen in zip(self.tables, rows, strict=False) if seen != 0]:
            raise NonFiniteError(
                f"rows of the table {', '.join(map(repr, bad))} are not finite at step {step}: the run stops, the last "
                "checkpoint is intact",
                field="step",
                value=step,
                remedy="resume with a smaller learning rate (optimizer.table_learning_rate)",
            )
        self.loss, self.wants_stop = loss, stop > 0

    def speeds(self) -> dict[str, float]:
        """Rates since the last call, and memory."""
        now_s = self.clock.now_s()
        elapsed_s = max(now_s - self._since_s, 1e-9)
        speeds = {
            "samples_per_s": self._samples / elapsed_s,
            "tokens_per_s": self._tokens / elapsed_s,
            "step_ms": 1000 * elapsed_s / max(self._steps, 1),
            "memory_mib": memory_mib(),
        }
        self._samples = self._tokens = self._steps = 0
        self._since_s = now_s
        return speeds


def parts_ms(spans: Sequence[Span]) -> dict[str, float]:
    """Mean milliseconds of each stage in the steps of these spans; what ran beside the steps is left out."""
    total: dict[str, float] = {}
    num_steps = max(1, sum(span.kind == "step" for span in spans))
    for span in spans:
        if span.kind not in ("step", "other"):
            name = span.name.removeprefix("train.").removeprefix("embedding.")
            total[name] = total.get(name, 0.0) + span.duration_ns * 1e-6 / num_steps
    return total


def memory_mib() -> float:
    """Memory of the device where there is one, else of the process."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return float(torch.cuda.max_memory_allocated() / 2**20)
    return float(psutil.Process().memory_info().rss / 2**20)
