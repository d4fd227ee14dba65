"""Trades of samples between ranks keep their order, and end with the first that fails."""

import pytest

from nestrec.data.batch_loader import BatchWorkers


def test_no_trade_follows_one_that_failed():
    """The peers may still be in it: they would take the next one for it."""
    tried = []

    def trade(position):
        tried.append(position)
        if position == 2:
            raise ValueError("a lost peer")
        return position

    with BatchWorkers(2, read=lambda position: position, trade=trade, finish=lambda stage: stage * 10) as threads:
        made = [threads.submit(position) for position in (1, 2, 3, 4)]
        assert made[0]() == 10
        for later in made[1:]:
            with pytest.raises(ValueError, match="a lost peer"):
                later()
    assert tried == [1, 2]
