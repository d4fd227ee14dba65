"""Ranks as threads of one process, for tests of what ranks agree on through `gather`."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from nestrec.checkpoint import Peers

T = TypeVar("T")


def run_ranks(world: int, work: Callable[[Peers], T]) -> list[T | Exception]:
    """Run `work` once for every rank at the same time; what each returned or raised."""
    barrier = threading.Barrier(world)
    mailbox: list[Any] = [None] * world
    results: list[Any] = [None] * world

    def run(rank: int) -> None:
        def gather(value: Any) -> list[Any]:
            mailbox[rank] = value
            barrier.wait(timeout=30)
            values = list(mailbox)
            barrier.wait(timeout=30)
            return values

        try:
            results[rank] = work(Peers(rank=rank, world=world, gather=gather))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
