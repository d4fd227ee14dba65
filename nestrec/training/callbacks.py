"""Callbacks for training progress, the interface of the model publisher, and the meter of loss and throughput.

A `TrainingCallback` is notified of the progress of a run; the console output, TensorBoard and tests use it. A
`ModelPublisher` writes model versions that servers load. The `Meter` reads the totals of a step one step late, so that
the host never waits for the device.
"""

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
    """Base class of training callbacks with empty hooks; override the ones you need. Hooks run on every rank."""

    def on_train_start(self, total_steps: int | None, first_step: int) -> None:
        """Called when the training loop starts; `total_steps` is None for online training."""

    def on_step_report(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        """Called periodically with loss, throughput and stage times."""

    def on_evaluation(self, evaluation: Evaluation, step: int, epoch: int) -> None:
        """Called after an evaluation on held-out data with the weights after `step`; `epoch` epochs were complete."""

    def on_window_evaluation(self, window: TimeWindow, metrics: Mapping[str, ConfidenceInterval], step: int) -> None:
        """Called after a time window was evaluated before training on it (test-then-train)."""

    def on_message(self, message: str) -> None:
        """Called with an informational message, for example what a warm start has loaded."""

    def on_warning(self, message: str) -> None:
        """Called with a warning, for example about a corrupt checkpoint that was skipped."""


class CallbackList(TrainingCallback):
    """Forwards all hooks to several callbacks."""

    def __init__(self, callbacks: Sequence[TrainingCallback]):
        self._callbacks = callbacks

    def on_train_start(self, total_steps: int | None, first_step: int) -> None:
        for callback in self._callbacks:
            callback.on_train_start(total_steps, first_step)

    def on_step_report(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        for callback in self._callbacks:
            callback.on_step_report(step, epoch, values)

    def on_evaluation(self, evaluation: Evaluation, step: int, epoch: int) -> None:
        for callback in self._callbacks:
            callback.on_evaluation(evaluation, step, epoch)

    def on_window_evaluation(self, window: TimeWindow, metrics: Mapping[str, ConfidenceInterval], step: int) -> None:
        for callback in self._callbacks:
            callback.on_window_evaluation(window, metrics, step)

    def on_message(self, message: str) -> None:
        for callback in self._callbacks:
            callback.on_message(message)

    def on_warning(self, message: str) -> None:
        for callback in self._callbacks:
            callback.on_warning(message)


class ModelPublisher(Protocol):
    """Publishes model versions of a run. All ranks make the same calls in the same order, with no step in flight."""

    def is_due(self, step: int) -> bool:
        """Return whether a version is due after this step; equal on all ranks."""
        ...

    def publish(self, session: Session, step: int, times: Any = None) -> None:
        """Copy the changes and write a version in the background; a step is published only once."""
        ...

    def on_window(self, end: WindowEnd) -> None:
        """Publish a version after a time window."""
        ...

    def close(self) -> None:
        """Wait until all versions are written, and raise the error of a failed write."""
        ...


class OpenPublisher(Protocol):
    """Factory of the publisher of a run; returns None if the run publishes no versions. Collective."""

    def __call__(
        self,
        cfg: PublishConfig,
        session: Session,
        identity: Identity | None,
        step: int,
        *,
        warn: Callable[[str], None],
        note: Callable[[str], None],
    ) -> ModelPublisher | None: ...


def open_no_publisher(
    cfg: PublishConfig,
    session: Session,
    identity: Identity | None,
    step: int,
    *,
    warn: Callable[[str], None],
    note: Callable[[str], None],
) -> None:
    """Raise a UserError if the config publishes versions; the default of a trainer without a publisher."""
    remedy = "pass open_publisher=nestrec.exporters.version_publisher.open_publishing to Trainer"
    require(
        not cfg.address,
        "publishing needs a publisher, but the trainer has none",
        option="publish.address",
        value=cfg.address,
        remedy=remedy,
    )


@dataclass
class Meter:
    """Checks that losses and rows are finite, and measures throughput between two reports."""

    clock: Clock = field(default_factory=RealClock)
    tables: Sequence[str] = ()
    """Names of the tables whose rows are checked, in the order of the step totals."""
    loss: float = float("nan")
    stop_requested: bool = False
    _pending: tuple[int, StepTotals] | None = None
    _samples: int = 0
    _tokens: int = 0
    _steps: int = 0
    _since_s: float = 0.0

    def start(self) -> None:
        self._since_s = self.clock.now_s()

    def watch(self, step: int, batch: Batch, totals: StepTotals) -> None:
        """Record the totals of a step, and read those of the previous step, which are ready by now."""
        self.flush()
        self._pending = (step, totals)
        self._samples += len(batch.global_samples)
        self._tokens += sum(part.num_tokens for part in batch.micro_batches)
        self._steps += 1

    def flush(self) -> None:
        """Read the pending totals.

        Raises:
            NonFiniteError: If the loss, the gradient norm or embedding rows are not finite.
        """
        if self._pending is None:
            return
        step, totals = self._pending
        self._pending = None
        numbers = torch.stack([totals.loss, totals.gradient_norm.double(), totals.stop_requested])
        loss, norm, stop, *rows = torch.cat([numbers, totals.rows.to(numbers)]).tolist()
        if not (abs(loss) < float("inf") and norm < float("inf")):
            raise NonFiniteError(
                f"the loss ({loss}) or the gradient norm ({norm}) is not finite; the run stops, and the last "
                "checkpoint is intact",
                option="step",
                value=step,
                remedy="resume with a smaller learning rate, or inspect the samples of this step",
            )
        if bad := [name for name, count in zip(self.tables, rows, strict=False) if count != 0]:
            raise NonFiniteError(
                f"rows of the table {', '.join(map(repr, bad))} are not finite; the run stops, and the last checkpoint "
                "is intact",
                option="step",
                value=step,
                remedy="resume with a smaller learning rate (optimizer.table_learning_rate)",
            )
        self.loss = loss
        self.stop_requested = stop > 0

    def speeds(self) -> dict[str, float]:
        """Return throughput since the last call, and memory use."""
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


def mean_stage_ms(spans: Sequence[Span]) -> dict[str, float]:
    """Return the mean milliseconds per step of each stage; spans outside of steps are ignored."""
    total: dict[str, float] = {}
    num_steps = max(1, sum(span.kind == "step" for span in spans))
    for span in spans:
        if span.kind not in ("step", "other"):
            name = span.name.removeprefix("train.").removeprefix("embedding.")
            total[name] = total.get(name, 0.0) + span.duration_ns * 1e-6 / num_steps
    return total


def memory_mib() -> float:
    """Return the peak GPU memory if CUDA is used, otherwise the resident memory of the process, in MiB."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return float(torch.cuda.max_memory_allocated() / 2**20)
    return float(psutil.Process().memory_info().rss / 2**20)


def gather_spans(topology: Topology, spans: Sequence[Span]) -> list[Span]:
    """Gather the spans of all ranks, sorted by time. Collective.

    Ranks on one machine share a clock. Between machines the clock offset is estimated from the end of the first common
    step, which occurs at about the same time on all ranks.
    """
    if topology.world == 1:
        return list(spans)
    gathered = all_gather_json(topology.control, [dataclasses.asdict(span) for span in spans])
    of_rank = {rank: [Span(**plain) for plain in plains] for rank, plains in enumerate(gathered)}
    return merge(of_rank, _offsets_ns(of_rank))


def _offsets_ns(of_rank: dict[int, list[Span]]) -> dict[int, int]:
    """Return each rank's clock offset to rank 0; offsets below the duration of a step count as 0."""
    steps = {rank: {s.step: s.end_ns for s in spans if s.kind == "step"} for rank, spans in of_rank.items()}
    offsets = {}
    for rank, ends in steps.items():
        common = sorted(set(ends) & set(steps[0]), key=lambda step: -1 if step is None else step)
        if common:
            ahead = ends[common[0]] - steps[0][common[0]]
            longest = max(s.duration_ns for s in of_rank[rank] if s.kind == "step")
            offsets[rank] = ahead if abs(ahead) > longest else 0
    return offsets
