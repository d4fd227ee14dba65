"""Training as it goes: a bar and figures on a terminal, a plain line every few seconds elsewhere."""

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
from nestrec.base.config_values import iso_moment
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
    """Shows the progress of a run while its block lasts; the time left is judged by the steps made since the start."""

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
        """steps of the whole run; none: it has no end"""
        self._first = self._step = 0
        self._epoch: int | None = None
        self._values: Mapping[str, Any] = {}
        self._start_s = self._clock.now_s()
        self._next_line_s = -math.inf
        self._is_line_pending = False
        self._live = Live(get_renderable=self._picture, console=self._console)

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

    def started(self, total_steps: int | None, first_step: int) -> None:
        self._total = total_steps
        self._first = first_step
        self._step = first_step
        self._start_s = self._clock.now_s()
        if first_step:
            self._print(f"resumed from step {first_step}")

    def stepped(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        self._step = step
        self._epoch = epoch
        self._values = values
        if self._console.is_terminal:
            return
        self._is_line_pending = True
        if self._clock.now_s() >= self._next_line_s:
            self._print_line()

    def evaluated(self, evaluation: Evaluation, step: int, epoch: int) -> None:
        plain = evaluation.to_plain()
        headline, metrics = plain["headline"], plain["metrics"]
        values = [f"{system} {mean_of_metric(metrics, system, headline):.4f}" for system in metrics]
        verdict = verdict_on(metrics, headline)
        times = f" ({verdict.short})" if verdict is not None else ""
        self._print(f"{plain['part']} after epoch {epoch}, {headline}: {', '.join(values)}{times}")

    def predicted(self, window: TimeWindow, metrics: Mapping[str, ConfidenceInterval], step: int) -> None:
        shown = ", ".join(f"{name} {value.mean:.4f}" for name, value in list(metrics.items())[:4])
        since = iso_moment(window.from_ms)[:16]
        self._print(f"window {window.number} from {since}, {window.num_events:,} events, before training: {shown}")

    def noted(self, message: str) -> None:
        self._print(message)

    def warned(self, message: str) -> None:
        self._print(f"warning: {message}")

    def stage(self, title: str) -> StageProgress:
        """A bar of its own for a checkpoint or an evaluation, shown while it lasts if that is over two seconds."""
        return progress_for(title, console=self._console, clock=self._clock)

    def _print_line(self) -> None:
        self._next_line_s = self._clock.now_s() + self._line_every_s
        self._is_line_pending = False
        of_all = "" if self._total is None else f"/{self._total}"
        self._print(f"{self._place()}step {self._step}{of_all}  {self._figures()}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _picture(self) -> RenderableType:
        if self._total == 0:
            return Text("loading", style="dim")
        if self._total is None:
            return Text(f"step {self._step:,}  {self._figures()}", style="dim", no_wrap=True, overflow="ellipsis")
        row = Table.grid(padding=(0, 1), expand=False)
        bar = ProgressBar(total=max(self._total, 1), completed=self._step, width=40)
        row.add_row(f"{self._place()}step {self._step:,}/{self._total:,}", bar)
        return Group(row, Text(self._figures(), style="dim", no_wrap=True, overflow="ellipsis"))

    def _place(self) -> str:
        """The epoch that is being made, counted from 1."""
        if self._epoch is None or self._total is None:
            return ""
        if self._num_epochs is None:
            return f"epoch {self._epoch + 1}  "
        return f"epoch {min(self._epoch + 1, self._num_epochs)}/{self._num_epochs}  "

    def _figures(self) -> str:
        shown = [show(as_number(self._values[name])) for name, show in _SHOWN.items() if name in self._values]
        left = [] if self._total is None else [f"ETA {duration(self._left_s(self._total))}"]
        return "  ".join([*shown, *left])

    def _left_s(self, total: int) -> float:
        made = self._step - self._first
        if made <= 0:
            return math.nan
        return (self._clock.now_s() - self._start_s) / made * max(0, total - self._step)
