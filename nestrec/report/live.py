"""Live training progress: a progress bar with metrics on a terminal, otherwise a line of text every few seconds."""

import math
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nestrec.base.clock import Clock, RealClock
from nestrec.base.config_values import format_iso_time
from nestrec.data.samples.time_windows import TimeWindow
from nestrec.report.formatting import as_number, compact, duration, mean_of_metric, memory, verdict_on
from nestrec.report.progress_bar import StageProgress, progress_for
from nestrec.tasks.metrics import ConfidenceInterval
from nestrec.tasks.task import Evaluation
from nestrec.training.callbacks import TrainingCallback

_SHOWN: dict[str, Callable[[float], str]] = {
    "loss": lambda value: f"loss {value:.4f}",
    "samples_per_s": lambda value: f"{compact(value)} samples/s",
    "tokens_per_s": lambda value: f"{compact(value)} tokens/s",
    "imbalance": lambda value: f"waiting for ranks {value:.0%}",
    "memory_mib": memory,
}


class LiveProgress(TrainingCallback):
    """Training callback and context manager that shows the progress of a run.

    Args:
        num_epochs: Total number of epochs, if it is known.
        console: Console to print to.
        clock: Source of time.
        line_every_s: Interval between lines if the console is not a terminal, in seconds.
    """

    def __init__(
        self,
        *,
        num_epochs: int | None = None,
        console: Console | None = None,
        clock: Clock | None = None,
        line_every_s: float = 10.0,
    ):
        self._num_epochs = num_epochs
        self._line_every_s = line_every_s
        self._console = console or Console()
        self._clock = clock or RealClock()
        self._total: int | None = 0
        """Total number of steps of the run; None for an unbounded stream, 0 before training starts."""
        self._first = self._step = 0
        self._epoch: int | None = None
        self._values: Mapping[str, Any] = {}
        self._start_s = self._clock.now_s()
        self._next_line_s = -math.inf
        self._is_line_pending = False
        self._live = Live(get_renderable=self._render, console=self._console)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        if self._is_line_pending:
            self._print_line()

    def on_train_start(self, total_steps: int | None, first_step: int) -> None:
        self._total = total_steps
        self._first = first_step
        self._step = first_step
        self._start_s = self._clock.now_s()
        if first_step:
            self._print(f"resumed from step {first_step}")

    def on_step_report(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        self._step = step
        self._epoch = epoch
        self._values = values
        if self._console.is_terminal:
            return
        self._is_line_pending = True
        if self._clock.now_s() >= self._next_line_s:
            self._print_line()

    def on_evaluation(self, evaluation: Evaluation, step: int, epoch: int) -> None:
        plain = evaluation.to_plain()
        headline, metrics = plain["headline"], plain["metrics"]
        values = [f"{system} {mean_of_metric(metrics, system, headline):.4f}" for system in metrics]
        verdict = verdict_on(metrics, headline)
        comparison = f" ({verdict.short})" if verdict is not None else ""
        self._print(f"{plain['part']} after epoch {epoch}, {headline}: {', '.join(values)}{comparison}")

    def on_window_evaluation(self, window: TimeWindow, metrics: Mapping[str, ConfidenceInterval], step: int) -> None:
        shown = ", ".join(f"{name} {value.mean:.4f}" for name, value in list(metrics.items())[:4])
        since = format_iso_time(window.from_ms)[:16]
        self._print(f"window {window.number} from {since}, {window.num_events:,} events, before training: {shown}")

    def on_message(self, message: str) -> None:
        self._print(message)

    def on_warning(self, message: str) -> None:
        self._print(f"warning: {message}")

    def stage(self, title: str) -> StageProgress:
        """Return a separate progress bar for a checkpoint or an evaluation, shown after two seconds."""
        return progress_for(title, console=self._console, clock=self._clock)

    def _print_line(self) -> None:
        self._next_line_s = self._clock.now_s() + self._line_every_s
        self._is_line_pending = False
        total = "" if self._total is None else f"/{self._total}"
        self._print(f"{self._epoch_text()}step {self._step}{total}  {self._values_text()}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _render(self) -> RenderableType:
        if self._total == 0:
            return Text("loading", style="dim")
        if self._total is None:
            return Text(f"step {self._step:,}  {self._values_text()}", style="dim", no_wrap=True, overflow="ellipsis")
        row = Table.grid(padding=(0, 1), expand=False)
        bar = ProgressBar(total=max(self._total, 1), completed=self._step, width=40)
        row.add_row(f"{self._epoch_text()}step {self._step:,}/{self._total:,}", bar)
        return Group(row, Text(self._values_text(), style="dim", no_wrap=True, overflow="ellipsis"))

    def _epoch_text(self) -> str:
        """Return the current epoch, counted from 1."""
        if self._epoch is None or self._total is None:
            return ""
        if self._num_epochs is None:
            return f"epoch {self._epoch + 1}  "
        return f"epoch {min(self._epoch + 1, self._num_epochs)}/{self._num_epochs}  "

    def _values_text(self) -> str:
        shown = [show(as_number(self._values[name])) for name, show in _SHOWN.items() if name in self._values]
        eta = [] if self._total is None else [f"ETA {duration(self._remaining_s(self._total))}"]
        return "  ".join([*shown, *eta])

    def _remaining_s(self, total: int) -> float:
        num_done = self._step - self._first  # steps before a resume took their time in another process
        if num_done <= 0:
            return math.nan
        return (self._clock.now_s() - self._start_s) / num_done * max(0, total - self._step)
