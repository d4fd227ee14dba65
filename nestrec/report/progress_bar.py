"""Progress bar for slow work such as data preparation, checkpoints and evaluations; fast work shows nothing."""

from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from nestrec.base.clock import Clock, RealClock
from nestrec.report.formatting import duration


class StageProgress:
    """Progress bar on a terminal, or periodic lines of text otherwise, after `show_after_s` seconds.

    It implements `data.prepare.progress.Progress`: call it with the name of the stage and the completed fraction, from
    0 to 1.
    """

    def __init__(self, title: str, *, console: Console, clock: Clock, show_after_s: float, line_every_s: float):
        self._title = title
        self._console = console
        self._clock = clock
        self._show_after_s = show_after_s
        self._line_every_s = line_every_s
        self._stage = ""
        self._done = 0.0
        self._start_s = clock.now_s()
        self._next_line_s = self._start_s + show_after_s
        # Redrawn only once per second, because it shares the cores with the work, which may be a benchmark.
        self._live = Live(get_renderable=self._render, console=console, transient=True, refresh_per_second=1)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        if self._is_due and error is None:
            self._print(f"{self._title}: done in {duration(self._elapsed_s)}")

    def __call__(self, stage: str, done: float) -> None:
        self._stage = stage
        self._done = min(max(done, 0.0), 1.0)
        if not self._console.is_terminal and self._clock.now_s() >= self._next_line_s:
            self._next_line_s = self._clock.now_s() + self._line_every_s
            self._print(f"{self._label}: {self._done:.0%}, {duration(self._elapsed_s)}")

    @property
    def _label(self) -> str:
        return f"{self._title}: {self._stage}" if self._stage and self._stage != self._title else self._title

    @property
    def _elapsed_s(self) -> float:
        return self._clock.now_s() - self._start_s

    @property
    def _is_due(self) -> bool:
        return self._elapsed_s >= self._show_after_s

    def _render(self) -> RenderableType:
        if not self._is_due:
            return Group()
        row = Table.grid(padding=(0, 1))
        # Work that does not report progress gets a pulsing bar, so that it does not look stuck at 0%.
        bar = ProgressBar(total=1.0, completed=self._done, width=30, pulse=not self._stage)
        row.add_row(self._label, bar, f"{self._done:.0%}" if self._stage else "", duration(self._elapsed_s))
        return row

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def progress_for(
    title: str,
    *,
    console: Console | None = None,
    clock: Clock | None = None,
    show_after_s: float = 2.0,
    line_every_s: float = 10.0,
) -> StageProgress:
    """Return a progress bar, which is a context manager and the progress callback.

    Args:
        title: Text in front of the bar.
        console: Console to print to.
        clock: Source of time.
        show_after_s: Time before the bar appears, in seconds.
        line_every_s: Interval between lines if the console is not a terminal, in seconds.

    Example:
        >>> with progress_for("prepare") as progress:
        ...     prepare("log", "events.csv", "data/mine", progress=progress)
    """
    return StageProgress(
        title,
        console=console or Console(),
        clock=clock or RealClock(),
        show_after_s=show_after_s,
        line_every_s=line_every_s,
    )
