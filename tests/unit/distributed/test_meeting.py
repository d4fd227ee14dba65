"""Ranks of one start meet, whatever earlier starts left in the store."""

import threading

import pytest
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from nestrec.base.errors import PeerLostError
from nestrec.distributed.rendezvous import store_of_this_start

LIMIT_S = 20.0


def start(store: Store, world: int) -> list[Store]:
    """All ranks of one start, as threads."""
    found: list[Store | None] = [None] * world

    def run(rank: int) -> None:
        found[rank] = store_of_this_start(store, rank, world, LIMIT_S)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    assert None not in found
    return [part for part in found if part is not None]


def test_ranks_of_a_start_share_a_part_that_no_other_start_sees() -> None:
    store = HashStore()
    for attempt in range(3):
        parts = start(store, 4)
        assert not parts[3].check(["address"])
        parts[0].set("address", str(attempt))
        assert [part.get("address").decode() for part in parts] == [str(attempt)] * 4


@pytest.mark.parametrize("died", [[0], [1], [1, 2], [0, 2]])
def test_ranks_that_died_while_meeting_do_not_disturb_the_next_start(died: list[int]) -> None:
    """They left a hello, or were waited for in vain, as often as this."""
    store = HashStore()
    for _ in range(2):
        for rank in died:
            with pytest.raises(PeerLostError):
                store_of_this_start(store, rank, 3, 0.02)
    parts = start(store, 3)
    parts[2].set("address", "here")
    assert parts[0].get("address") == parts[1].get("address") == b"here"


def test_a_rank_that_never_comes_is_named_within_the_limit() -> None:
    with pytest.raises(PeerLostError, match=r"ranks \[1, 2\] did not start"):
        store_of_this_start(PrefixStore("a", HashStore()), 0, 3, 0.05)
    with pytest.raises(PeerLostError, match="rank 0 did not start"):
        store_of_this_start(PrefixStore("b", HashStore()), 2, 3, 0.05)
