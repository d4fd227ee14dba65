"""Batch workers exchange samples between ranks in order, and stop at the first exchange that fails."""

import pytest

from nestrec.data.batch_loader import BatchWorkers


def test_batch_workers_stop_exchanges_after_a_failure():
    """Peers may still be in the failed exchange, and would match it with the next one."""
    exchanged = []

    def exchange(position):
        exchanged.append(position)
        if position == 2:
            raise ValueError("a lost peer")
        return position

    with BatchWorkers(2, read=lambda position: position, exchange=exchange, finish=lambda stage: stage * 10) as workers:
        results = [workers.submit(position) for position in (1, 2, 3, 4)]
        assert results[0]() == 10
        for later in results[1:]:
            with pytest.raises(ValueError, match="a lost peer"):
                later()
    assert exchanged == [1, 2]
