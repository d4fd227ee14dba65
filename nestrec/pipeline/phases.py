"""A batch in flight: one type for each phase, which has what the phase has and nothing that comes later.

    LoadedBatch     on its way to the device, its keys deduplicated
    RoutedBatch     its keys exchanged, what crosses with each micro-batch put together
    FetchedBatch    its rows in a buffer on their owners; through its window vectors come and gradients go

Each phase is begun before it is done: what a lane is still at work on is `Coming`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from nestrec.base.coming import Coming
from nestrec.base.errors import BatchError
from nestrec.data.batches import Batch, MicroBatch
from nestrec.embedding.flight.overlap import Overlap
from nestrec.embedding.flight.routing import Routed
from nestrec.embedding.flight.source_keys import SourceKeys
from nestrec.embedding.flight.working_set import WorkingSet
from nestrec.pipeline.window import Window

WindowT_co = TypeVar("WindowT_co", bound=Window, covariant=True)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the first phase makes."""

    micro_batches: tuple[MicroBatch, ...]
    """on the device"""
    source: SourceKeys


@dataclass(frozen=True, slots=True)
class LoadedBatch:
    """A batch whose loading has begun."""

    number: int
    """of its step"""
    batch: Batch
    loaded: Coming[Loaded]


@dataclass(frozen=True, slots=True)
class RoutedBatch:
    """A batch whose keys are being exchanged."""

    number: int
    batch: Batch
    loaded: Coming[Loaded]
    routed: Coming[Routed]

    @property
    def num_micro_batches(self) -> int:
        return len(self.batch.micro_batches)

    def is_refused(self) -> bool:
        """Whether its keys hold a mistake, which its own step will raise. The same on every rank; waits for them."""
        try:
            self.routed.wait()
        except BatchError:
            return True
        return False


class FetchedBatch(Generic[WindowT_co]):
    """A batch whose rows are being read."""

    def __init__(
        self,
        keys: RoutedBatch,
        rows: Coming[WorkingSet],
        open_window: "Callable[[FetchedBatch[WindowT_co]], WindowT_co]",
    ) -> None:
        self.keys, self.rows, self._open = keys, rows, open_window
        self.number, self.num_micro_batches = keys.number, keys.num_micro_batches
        self._window: WindowT_co | None = None

    @property
    def window(self) -> WindowT_co:
        """Its exchanges; whoever asks first waits for the rows."""
        if self._window is None:
            self._window = self._open(self)
        return self._window


@dataclass(frozen=True, slots=True)
class FollowingBatch(Generic[WindowT_co]):
    """The next batch, fetched beside the one that trains."""

    batch: FetchedBatch[WindowT_co]
    shared: Coming[Overlap]
    """rows of both"""
