"""Batches in order, with a look at those that follow."""

from collections import deque
from collections.abc import Generator, Iterator

from nestrec.data.batches import Batch


class Feed:
    """An iterator that can be asked what comes next without taking it."""

    def __init__(self, batches: Iterator[Batch], most: int | None = None) -> None:
        """most: batches that will be taken; those beyond are not looked at. None: all."""
        self._batches, self._left = batches, most
        self._ahead: deque[Batch] = deque()

    def __iter__(self) -> "Feed":
        return self

    def __next__(self) -> Batch:
        batch = self.peek(1)
        if batch is None:
            raise StopIteration
        return self._ahead.popleft()

    def peek(self, ahead: int) -> Batch | None:
        """The batch that the `ahead`-th call of next from now on will give, or none beyond the end."""
        while len(self._ahead) < ahead:
            batch = None if self._left == 0 else next(self._batches, None)
            if batch is None:
                return None
            self._left = None if self._left is None else self._left - 1
            self._ahead.append(batch)
        return self._ahead[ahead - 1]

    def close(self) -> None:
        """End what makes the batches."""
        if isinstance(self._batches, Generator):
            self._batches.close()
