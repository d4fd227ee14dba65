"""How the ranks of one start find each other in a store that may still hold what earlier starts left in it.

torchrun keeps one store over all restarts of a job (torch 2.13; its count of restarts is kept by each node for itself,
and so cannot tell the starts apart). Process groups made in it as it is would connect to ranks that died long ago.
So the ranks first agree on a name that no other start has used, and put everything under it:

    rank r:  hello/r = h            a name of its own, made up for this start
    rank 0:  reply/h = t            for every hello it sees, until all have answered; t is the name of this start
    rank r:  ack/t/r

A hello that a dead rank left behind gets a reply that nobody reads.
"""

import contextlib
import functools
import os
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from nestrec.base.errors import PeerLostError

_POLL_S = 0.005
_OF_STORE = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


@contextlib.contextmanager
def meeting_watched() -> Iterator[None]:
    """Name what it means when process groups cannot be made."""
    try:
        yield
    except (RuntimeError, DistError) as error:
        problem = f"a peer was lost while the ranks met: {str(error).splitlines()[0]}"
        raise PeerLostError(problem, remedy="restart all ranks from the last checkpoint") from error


def store_of_this_start(store: Store, rank: int, world: int, timeout_s: float) -> Store:
    """The part of `store` that only the ranks of this start use; every rank must call it."""
    meeting = PrefixStore("nestrec/meeting", store)
    deadline_s = time.monotonic() + timeout_s
    name = _receive(meeting, world, deadline_s) if rank == 0 else _join(meeting, rank, deadline_s)
    return PrefixStore(f"nestrec/{name}", store)


def _receive(meeting: Store, world: int, deadline_s: float) -> str:
    name = uuid.uuid4().hex
    missing = set(range(1, world))
    while missing:
        for rank in sorted(missing):
            if meeting.check([f"hello/{rank}"]):
                meeting.set(f"reply/{meeting.get(f'hello/{rank}').decode()}", name)
            if meeting.check([f"ack/{name}/{rank}"]):
                missing.discard(rank)
        _wait_a_little(deadline_s, f"ranks {sorted(missing)} did not start")
    return name


def _join(meeting: Store, rank: int, deadline_s: float) -> str:
    hello = uuid.uuid4().hex
    meeting.set(f"hello/{rank}", hello)
    while not meeting.check([f"reply/{hello}"]):
        _wait_a_little(deadline_s, "rank 0 did not start")
    name: str = meeting.get(f"reply/{hello}").decode()
    meeting.set(f"ack/{name}/{rank}", "")
    return name


def _wait_a_little(deadline_s: float, problem: str) -> None:
    if time.monotonic() > deadline_s:
        raise PeerLostError(problem, remedy="look at the logs of the other ranks, then start all of them again")
    time.sleep(_POLL_S)


def open_store(timeout_s: float) -> tuple[Store, int, int]:
    """The store that the launcher's environment names, narrowed to this start; rank and number of ranks."""
    store, rank, world = _store_at(tuple(os.environ.get(name, "") for name in _OF_STORE), timeout_s)
    return store_of_this_start(store, rank, world, timeout_s), rank, world


@functools.cache
def _store_at(_place: tuple[str, ...], timeout_s: float) -> tuple[Store, int, int]:
    """Kept by a process that meets its peers more than once: where no launcher holds the store the first rank does, and
    one that is ahead would meet the others in a store that is about to end."""
    found: tuple[Store, int, int] = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    return found
