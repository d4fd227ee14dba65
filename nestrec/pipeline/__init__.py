"""Schedules: one small file each, chosen by name. All of them arrange the same stages in time."""

from collections.abc import Callable

from nestrec.embedding import EmbeddingEngine
from nestrec.pipeline.dual_buffer import DualBuffer
from nestrec.pipeline.feed import Feed
from nestrec.pipeline.frozen_window import FrozenWindow
from nestrec.pipeline.nested import Nested
from nestrec.pipeline.options import PipelineConfig
from nestrec.pipeline.priority import Priority
from nestrec.pipeline.semi_async import SemiAsync
from nestrec.pipeline.serial import Serial
from nestrec.pipeline.stages import Compute, Coupling, Dense, Rates, Schedule, Step, Totals
from nestrec.pipeline.stale import Stale
from nestrec.trace import Tracer

SCHEDULES: dict[str, Callable[[EmbeddingEngine, Compute, Dense, Tracer, PipelineConfig], Schedule]] = {
    "serial": Serial,
    "stale": Stale,
    "dual_buffer": DualBuffer,
    "frozen_window": FrozenWindow,
    "nested": Nested,
    "priority": Priority,
    "semi_async": SemiAsync,
}

__all__ = [
    "SCHEDULES",
    "Compute",
    "Coupling",
    "Dense",
    "DualBuffer",
    "Feed",
    "FrozenWindow",
    "Nested",
    "PipelineConfig",
    "Priority",
    "Rates",
    "Schedule",
    "SemiAsync",
    "Serial",
    "Stale",
    "Step",
    "Totals",
]
