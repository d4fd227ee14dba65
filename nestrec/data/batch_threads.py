"""The threads behind `Batches`: several read and assemble, in any order; one trades samples, in the order of the steps.

    read (pool) -> trade (one thread, in order) -> assemble (pool)

Ranks must enter the same trade at the same time, so trades are never reordered, never dropped half way, and none
follows one that failed: the peers may still be in it.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from nestrec.data.dataset import Rows
from nestrec.data.dealing import Share
from nestrec.data.order import Position

BatchT = TypeVar("BatchT")


@dataclass(frozen=True, slots=True)
class UnfinishedBatch:
    """A batch that is being made."""

    position: Position
    samples: NDArray[np.int64]
    """of the global batch"""
    tokens: NDArray[np.int64]
    """of these samples"""
    share: Share
    """what this rank holds of it now"""
    rows: Rows
    """the stored rows of the share"""


class BatchThreads(Generic[BatchT]):
    """Makes batches in the background while its block lasts."""

    def __init__(
        self,
        workers: int,
        read: Callable[[Position], UnfinishedBatch],
        trade: Callable[[UnfinishedBatch], UnfinishedBatch] | None,
        finish: Callable[[UnfinishedBatch], BatchT],
    ):
        """trade: none where ranks do not trade."""
        self._read, self._trade, self._finish = read, trade, finish
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="data")
        self._trader = ThreadPoolExecutor(1, thread_name_prefix="trade")
        self._failed: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Trades that were begun are finished: every rank has begun the same ones.
        self._trader.shutdown(wait=True)
        self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, position: Position) -> Callable[[], BatchT]:
        """Start to make a batch; the function returned waits for it."""
        if self._trade is None:
            return self._pool.submit(lambda: self._finish(self._read(position))).result
        read = self._pool.submit(self._read, position)
        traded = self._trader.submit(self._traded, read)
        return lambda: traded.result().result()

    def _traded(self, read: Future[UnfinishedBatch]) -> Future[BatchT]:
        if self._failed is not None:
            raise self._failed
        assert self._trade is not None
        try:
            stage = self._trade(read.result())
        except BaseException as error:
            self._failed = error
            raise
        return self._pool.submit(self._finish, stage)
