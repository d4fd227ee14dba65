"""Who hears of the progress of a run; the console is one, a test another."""

from collections.abc import Mapping, Sequence
from typing import Any

from nestrec.data.samples.windows import TimeWindow
from nestrec.tasks.metrics import Interval
from nestrec.tasks.task import Evaluation


class Listener:
    """Hears everything and says nothing."""

    def started(self, total_steps: int | None, first_step: int) -> None:
        """The loop begins."""

    def stepped(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        """A report of speeds and loss."""

    def evaluated(self, evaluation: Evaluation, step: int, epoch: int) -> None:
        """A measurement on held-out data of the weights after `step`, when `epoch` epochs were complete."""

    def predicted(self, window: TimeWindow, metrics: Mapping[str, Interval], step: int) -> None:
        """A window of time, as the weights after `step` saw it before it was trained on."""

    def noted(self, message: str) -> None:
        """Something that the user is told once, such as what was taken over from another run."""

    def warned(self, message: str) -> None:
        """Something the user should know, such as a damaged checkpoint that was skipped."""


class Listeners(Listener):
    """Several listeners as one."""

    def __init__(self, listeners: Sequence[Listener]):
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

    def predicted(self, window: TimeWindow, metrics: Mapping[str, Interval], step: int) -> None:
        for listener in self._listeners:
            listener.predicted(window, metrics, step)

    def noted(self, message: str) -> None:
        for listener in self._listeners:
            listener.noted(message)

    def warned(self, message: str) -> None:
        for listener in self._listeners:
            listener.warned(message)
