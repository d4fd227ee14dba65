"""Rendezvous: lets the ranks of one start find each other in a store that may hold entries of earlier starts.

torchrun keeps one store over all restarts of a job. Its restart count is local to each node (torch 2.13), so it cannot
distinguish the starts. Process groups created directly in that store could connect to addresses of ranks that have
died. Therefore the ranks first agree on a unique name for this start and use it as the prefix of all their keys:

    rank r:  hello/r = h            h is a random name that rank r generates for this start
    rank 0:  reply/h = t            for every hello that it reads, until all ranks are acknowledged; t names this start
    rank r:  ack/t/r

The hello of a dead rank also gets a reply, which no process reads.
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
_STORE_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


@contextlib.contextmanager
def watch_rendezvous() -> Iterator[None]:
    """Raise a PeerLostError if process groups cannot be created inside the block."""
    try:
        yield
    except (RuntimeError, DistError) as error:
        problem = f"a peer was lost during the rendezvous: {str(error).splitlines()[0]}"
        raise PeerLostError(problem, remedy="restart all ranks from the last checkpoint") from error


def scoped_store(store: Store, rank: int, world: int, timeout_s: float) -> Store:
    """Return a view of `store` with a key prefix that only the ranks of this start use. Collective."""
    handshake = PrefixStore("nestrec/meeting", store)
    deadline_s = time.monotonic() + timeout_s
    name = _accept_ranks(handshake, world, deadline_s) if rank == 0 else _announce(handshake, rank, deadline_s)
    return PrefixStore(f"nestrec/{name}", store)


def _accept_ranks(handshake: Store, world: int, deadline_s: float) -> str:
    name = uuid.uuid4().hex
    missing = set(range(1, world))
    while missing:
        for rank in sorted(missing):
            if handshake.check([f"hello/{rank}"]):
                handshake.set(f"reply/{handshake.get(f'hello/{rank}').decode()}", name)
            if handshake.check([f"ack/{name}/{rank}"]):
                missing.discard(rank)
        _poll(deadline_s, f"ranks {sorted(missing)} did not start")
    return name


def _announce(handshake: Store, rank: int, deadline_s: float) -> str:
    hello = uuid.uuid4().hex
    handshake.set(f"hello/{rank}", hello)
    while not handshake.check([f"reply/{hello}"]):
        _poll(deadline_s, "rank 0 did not start")
    name: str = handshake.get(f"reply/{hello}").decode()
    handshake.set(f"ack/{name}/{rank}", "")
    return name


def _poll(deadline_s: float, problem: str) -> None:
    if time.monotonic() > deadline_s:
        raise PeerLostError(problem, remedy="read the logs of the other ranks, then restart all ranks")
    time.sleep(_POLL_S)


def open_store(timeout_s: float) -> tuple[Store, int, int]:
    """Open the store that the launcher's environment variables name.

    Returns:
        The store with the key prefix of this start, the rank, and the number of ranks.
    """
    store, rank, world = _store_at(tuple(os.environ.get(name, "") for name in _STORE_VARIABLES), timeout_s)
    return scoped_store(store, rank, world, timeout_s), rank, world


@functools.cache
def _store_at(_variables: tuple[str, ...], timeout_s: float) -> tuple[Store, int, int]:
    """Connect to the store once per process and set of environment variables.

    Without a launcher, the first rank hosts the store. If a process connected again for a second rendezvous, a fast
    rank could join a store that is about to shut down.
    """
    result: tuple[Store, int, int] = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    return result
