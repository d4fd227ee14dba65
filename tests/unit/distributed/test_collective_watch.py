"""Collectives that the host does not wait for end the process when they do not end."""

import pytest
import torch

from nestrec.base.errors import PeerLostError
from nestrec.distributed.collective_watchdog import CollectiveWatchdog
from nestrec.distributed.collectives import all_reduce_sum
from nestrec.distributed.topology import Communicator
from nestrec.trace.tracer import CollectiveLog


class Watched:
    """A watch with a clock of its own, and what it would end the process with."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.ends = list[str]()
        self.watch = CollectiveWatchdog(10.0, end=lambda error: self.ends.append(str(error)), clock=lambda: self.now_s)

    def look_at(self, now_s: float) -> list[str]:
        self.now_s = now_s
        self.watch.look()
        return self.ends


def test_a_collective_that_does_not_end_in_time_is_named_once():
    watched = Watched()
    over = set()
    for name in ("vectors.all_to_all", "dense.all_reduce"):
        watched.watch.await_end(name, lambda name=name: name in over)
    assert not watched.look_at(9.0)
    over.add("vectors.all_to_all")
    assert not watched.look_at(9.5), "the first has ended"
    assert not watched.look_at(19.0), "the next has had as long since then"
    (end,) = watched.look_at(20.0)
    assert "a peer was lost in dense.all_reduce: no answer in 10 s" in end
    assert watched.look_at(40.0) == [end]


def test_a_collective_that_was_launched_late_has_its_own_time():
    watched = Watched()
    watched.look_at(100.0)
    watched.watch.await_end("keys.all_to_all", lambda: False)
    assert not watched.look_at(109.0)
    assert len(watched.look_at(111.0)) == 1


def test_an_error_of_the_device_is_told_at_once():
    watched = Watched()

    def fails() -> bool:
        raise RuntimeError("NCCL communicator was aborted\nlong trace")

    watched.watch.await_end("vectors.all_to_all", fails)
    (end,) = watched.look_at(0.1)
    assert "a peer was lost in vectors.all_to_all: NCCL communicator was aborted" in end
    assert "long trace" not in end


def test_a_host_that_waits_inside_a_collective_is_watched_too():
    watched = Watched()

    class Waits:
        """As keys do, which the host reads: a peer is gone, and the call does not return."""

        def all_reduce(self, tensor: torch.Tensor) -> None:
            assert not watched.look_at(9.0)
            assert len(watched.look_at(11.0)) == 1
            raise RuntimeError("the process has ended")

    keys = Communicator("keys", 0, 2, None, CollectiveLog(), Waits(), watch=watched.watch)
    with pytest.raises(PeerLostError):
        all_reduce_sum(keys, torch.zeros(1))
    assert "a peer was lost in keys.all_reduce: no answer in 10 s" in watched.ends[0]
    assert watched.look_at(40.0) == watched.ends[:1], "it has returned"


def test_a_rank_without_memory_for_what_it_receives_has_lost_no_peer():
    class Full:
        def all_reduce(self, tensor: torch.Tensor) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    vectors = Communicator("vectors", 0, 2, None, CollectiveLog(), Full())
    with pytest.raises(torch.OutOfMemoryError):
        all_reduce_sum(vectors, torch.zeros(1))
