"""Several listeners as one."""

from collections.abc import Mapping
from typing import Any

from nestrec.training.listener import Listener
from nestrec.training.tasks.task import Evaluation


class Listeners(Listener):
    """Tells everyone, in order."""

    def __init__(self, *listeners: Listener):
        self._listeners = listeners

    def started(self, total_steps: int, first_step: int) -> None:
        for listener in self._listeners:
            listener.started(total_steps, first_step)

    def stepped(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        for listener in self._listeners:
            listener.stepped(step, epoch, values)

    def evaluated(self, evaluation: Evaluation, step: int, epoch: int) -> None:
        for listener in self._listeners:
            listener.evaluated(evaluation, step, epoch)

    def warned(self, message: str) -> None:
        for listener in self._listeners:
            listener.warned(message)
