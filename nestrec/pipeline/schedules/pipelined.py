"""What the schedules that run on lanes have in common."""

from collections.abc import Callable
from typing import TypeVar

from nestrec.embedding import EmbeddingEngine
from nestrec.pipeline.machine import Machine
from nestrec.pipeline.options import PipelineConfig
from nestrec.pipeline.stages import Compute, Dense
from nestrec.trace import Tracer

T = TypeVar("T")


class Pipelined:
    """A machine, and the end of it."""

    machine_type: type[Machine] = Machine
    """whose stages it arranges"""

    def __init__(
        self, engine: EmbeddingEngine, compute: Compute, dense: Dense, tracer: Tracer, options: PipelineConfig
    ) -> None:
        self._machine = self.machine_type(engine, compute, dense, tracer, window_cache=options.window_cache)

    def issue(self, collective: Callable[[], T]) -> T:
        """Run a collective of the caller's in its place in the order of collectives, and wait for it."""
        return self._machine.issue(collective)

    def close(self) -> None:
        """End the threads."""
        self._machine.lanes.close()

    def abandon(self, error: BaseException) -> None:
        """End the threads without finishing what was begun."""
        self._machine.lanes.abandon(error)
