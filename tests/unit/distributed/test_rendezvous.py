"""The ranks of a start find each other, also if earlier starts left entries in the store."""

import threading

import pytest
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from nestrec.base.errors import PeerLostError
from nestrec.distributed.rendezvous import scoped_store

LIMIT_S = 20.0


def start(store: Store, world: int) -> list[Store]:
    """Run all ranks of a start as threads, and return their scoped stores."""
    stores: list[Store | None] = [None] * world

    def run(rank: int) -> None:
        stores[rank] = scoped_store(store, rank, world, LIMIT_S)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    assert None not in stores
    return [part for part in stores if part is not None]


def test_rendezvous_isolates_stores_of_starts() -> None:
    store = HashStore()
    for attempt in range(3):
        parts = start(store, 4)
        assert not parts[3].check(["address"])
        parts[0].set("address", str(attempt))
        assert [part.get("address").decode() for part in parts] == [str(attempt)] * 4


@pytest.mark.parametrize("died", [[0], [1], [1, 2], [0, 2]])
def test_rendezvous_ignores_ranks_of_failed_start(died: list[int]) -> None:
    """In two earlier starts, these ranks registered, but the other ranks did not start."""
    store = HashStore()
    for _ in range(2):
        for rank in died:
            with pytest.raises(PeerLostError):
                scoped_store(store, rank, 3, 0.02)
    parts = start(store, 3)
    parts[2].set("address", "here")
    assert parts[0].get("address") == parts[1].get("address") == b"here"


def test_rendezvous_names_missing_rank_in_time() -> None:
    with pytest.raises(PeerLostError, match=r"Ranks \[1, 2\] did not start"):
        scoped_store(PrefixStore("a", HashStore()), 0, 3, 0.05)
    with pytest.raises(PeerLostError, match="Rank 0 did not start"):
        scoped_store(PrefixStore("b", HashStore()), 2, 3, 0.05)
