"""A feed shows what follows, and nothing beyond the batches that will be taken."""

from collections.abc import Iterator
from typing import Any

import pytest

from nestrec.base.errors import DataError
from nestrec.pipeline import LookaheadIterator


def batches(good: int) -> Iterator[Any]:
    yield from range(1, good + 1)
    raise DataError("is damaged")


def test_a_batch_beyond_the_last_one_is_not_looked_at():
    feed = LookaheadIterator(batches(3), most=3)
    assert [feed.peek(n) for n in (1, 2, 3, 4)] == [1, 2, 3, None]
    assert list(feed) == [1, 2, 3]
    assert feed.peek(1) is None


def test_without_a_last_batch_all_are_taken():
    feed = LookaheadIterator(batches(3))
    assert [next(feed), next(feed), feed.peek(1)] == [1, 2, 3]
    with pytest.raises(DataError, match="is damaged"):
        feed.peek(2)
