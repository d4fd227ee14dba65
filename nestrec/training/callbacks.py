"""The trainer calls these: listeners, the publisher of versions, the meter of losses and speeds.

A `TrainingCallback` hears of the progress of a run; the console is one, a test another. A `ModelPublisher` writes
versions of the model for servers. The `Meter` reads the totals of a step one step late, so that the host never waits
for the device."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import psutil
import torch

from nestrec.base.clock import Clock, RealClock
from nestrec.base.errors import NonFiniteError, require
from nestrec.data.batch_loader import Batch
from nestrec.data.samples.time_windows import TimeWindow
from nestrec.distributed import Topology
from nestrec.distributed.collectives import all_gather_json
from nestrec.pipeline import StepTotals
from nestrec.tasks.metrics import ConfidenceInterval
from nestrec.tasks.task import Evaluation
from nestrec.trace import Span, merge
from nestrec.training.run_config import PublishConfig
from nestrec.training.run_identity import Identity
from nestrec.training.training_session import Session, WindowEnd


class TrainingCallback:
    """Hears everything and says nothing."""

    def started(self, total_steps: int | None, first_step: int) -> None:
        """The loop begins."""

    def stepped(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        """A report of speeds and loss."""

    def evaluated(self, evaluation: Evaluation, step: int, epoch: int) -> None:
        """A measurement on held-out data of the weights after `step`, when `epoch` epochs were complete."""

    def predicted(self, window: TimeWindow, metrics: Mapping[str, ConfidenceInterval], step: int) -> None:
        """A window of time, as the weights after `step` saw it before it was trained on."""

    def noted(self, message: str) -> None:
        """Something that the user is told once, such as what was taken over from another run."""

    def warned(self, message: str) -> None:
        """Something the user should know, such as a damaged checkpoint that was skipped."""


class CallbackList(TrainingCallback):
    """Several listeners as one."""

    def __init__(self, listeners: Sequence[TrainingCallback]):
        self._listeners = listeners

    def started(self, total_steps: int | None, first_step: int) -> None:
        for listener in self._listeners:
            listener.started(total_steps, first_step)

    def stepped(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        for listener in self._listeners:
            listener.stepped(step, epoch, values)

    def evaluated(self, evaluation: Evaluation, step: int, epoch: int) -> None:
        for listener in self._listeners:
            listener.evaluated(evaluation, step, epoch)

    def predicted(self, window: TimeWindow, metrics: Mapping[str, ConfidenceInterval], step: int) -> None:
        for listener in self._listeners:
            listener.predicted(window, metrics, step)

    def noted(self, message: str) -> None:
        for listener in self._listeners:
            listener.noted(message)

    def warned(self, message: str) -> None:
        for listener in self._listeners:
            listener.warned(message)


class ModelPublisher(Protocol):
    """All ranks make the same calls in the same order, while nothing is in flight."""

    def is_due(self, step: int) -> bool:
        """Whether a version of this step is to be published. The same on all ranks."""
        ...

    def publish(self, session: Session, step: int, times: Any = None) -> None:
        """What has changed is copied, and written in the background. Nothing where this step is published already."""
        ...

    def on_window(self, end: WindowEnd) -> None:
        """The same after a window."""
        ...

    def close(self) -> None:
        """Wait until everything is written, and raise what went wrong."""
        ...


class OpenPublishing(Protocol):
    """Opens the publishing of a run. Collective."""

    def __call__(
        self,
        cfg: PublishConfig,
        session: Session,
        identity: Identity | None,
        step: int,
        *,
        warn: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> ModelPublisher | None: ...


def cannot_publish(
    cfg: PublishConfig,
    session: Session,
    identity: Identity | None,
    step: int,
    *,
    warn: Callable[[str], None],
    tell: Callable[[str], None],
) -> None:
    """Raises if versions are to be published by a trainer that was not given a way to do so."""
    remedy = "give Trainer open_publishing=nestrec.exporters.version_publisher.open_publishing"
    require(not cfg.address, "needs a publisher", option="publish.address", value=cfg.address, remedy=remedy)


@dataclass
class Meter:
    """Watches losses and rows, and counts samples and tokens between two reports."""

    clock: Clock = field(default_factory=RealClock)
    tables: Sequence[str] = ()
    """names of the tables whose rows the totals tell of"""
    loss: float = float("nan")
    wants_stop: bool = False
    _pending: tuple[int, StepTotals] | None = None
    _samples: int = 0
    _tokens: int = 0
    _steps: int = 0
    _since_s: float = 0.0

    def start(self) -> None:
        self._since_s = self.clock.now_s()

    def watch(self, step: int, batch: Batch, totals: StepTotals) -> None:
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
                option="step",
                value=step,
                remedy="resume with a smaller learning rate, or look at this step's samples",
            )
        if bad := [name for name, seen in zip(self.tables, rows, strict=False) if seen != 0]:
            raise NonFiniteError(
                f"rows of the table {', '.join(map(repr, bad))} are not finite at step {step}: the run stops, the last "
                "checkpoint is intact",
                option="step",
                value=step,
                remedy="resume with a smaller learning rate (optimizer.table_learning_rate)",
            )
        self.loss = loss
        self.wants_stop = stop > 0

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


def spans_of_ranks(topology: Topology, spans: Sequence[Span]) -> list[Span]:
    """Those of every rank, in order of time. Collective.

    Ranks on one machine share a clock. Clocks of machines differ: the end of the first collective that all took part
    in, which comes at about the same moment everywhere, says by how much.
    """
    if topology.world == 1:
        return list(spans)
    gathered = all_gather_json(topology.control, [dataclasses.asdict(span) for span in spans])
    of_rank = {rank: [Span(**plain) for plain in plains] for rank, plains in enumerate(gathered)}
    return merge(of_rank, _offsets_ns(of_rank))


def _offsets_ns(of_rank: dict[int, list[Span]]) -> dict[int, int]:
    """How far each rank's clock is ahead of rank 0's; nothing where it is less than a step, as on one machine."""
    steps = {rank: {s.step: s.end_ns for s in spans if s.kind == "step"} for rank, spans in of_rank.items()}
    offsets = {}
    for rank, ends in steps.items():
        common = sorted(set(ends) & set(steps[0]), key=lambda step: -1 if step is None else step)
        if common:
            ahead = ends[common[0]] - steps[0][common[0]]
            longest = max(s.duration_ns for s in of_rank[rank] if s.kind == "step")
            offsets[rank] = ahead if abs(ahead) > longest else 0
    return offsets
