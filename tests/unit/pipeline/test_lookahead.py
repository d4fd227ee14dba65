"""A lookahead iterator peeks at following batches, but not beyond the last batch that will be used."""

from collections.abc import Iterator
from typing import Any

import pytest

from nestrec.base.errors import DataError
from nestrec.pipeline import LookaheadIterator


def batches(good: int) -> Iterator[Any]:
    yield from range(1, good + 1)
    raise DataError("is damaged")


def test_lookahead_iterator_stops_at_last_batch():
    feed = LookaheadIterator(batches(3), limit=3)
    assert [feed.peek(n) for n in (1, 2, 3, 4)] == [1, 2, 3, None]
    assert list(feed) == [1, 2, 3]
    assert feed.peek(1) is None


def test_lookahead_iterator_without_limit_returns_all_batches():
    feed = LookaheadIterator(batches(3))
    assert [next(feed), next(feed), feed.peek(1)] == [1, 2, 3]
    with pytest.raises(DataError, match="Is damaged"):
        feed.peek(2)
