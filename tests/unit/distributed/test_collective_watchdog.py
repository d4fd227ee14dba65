"""The watchdog errors the process if a collective does not complete in time."""

import pytest
import torch

from nestrec.base.errors import PeerLostError
from nestrec.distributed.collective_watchdog import CollectiveWatchdog
from nestrec.distributed.collectives import all_reduce_sum
from nestrec.distributed.topology import Communicator
from nestrec.trace.tracer import CollectiveLog


class WatchdogHarness:
    """Watchdog with a manual clock that records its errors instead of ending the process."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.errors = list[str]()
        self.watchdog = CollectiveWatchdog(
            10.0, on_failure=lambda error: self.errors.append(str(error)), clock=lambda: self.now_s
        )

    def check_at(self, now_s: float) -> list[str]:
        self.now_s = now_s
        self.watchdog.check_pending()
        return self.errors


def test_watchdog_names_timed_out_collective_once():
    harness = WatchdogHarness()
    completed = set()
    for name in ("vectors.all_to_all", "dense.all_reduce"):
        harness.watchdog.track(name, lambda name=name: name in completed)
    assert not harness.check_at(9.0)
    completed.add("vectors.all_to_all")
    assert not harness.check_at(9.5), "the first collective has completed"
    assert not harness.check_at(19.0), "the time limit of the next collective starts when the first completes"
    (error,) = harness.check_at(20.0)
    assert "A peer was lost in dense.all_reduce: no response within 10 s" in error
    assert harness.check_at(40.0) == [error]


def test_watchdog_timeout_starts_at_launch():
    harness = WatchdogHarness()
    harness.check_at(100.0)
    harness.watchdog.track("keys.all_to_all", lambda: False)
    assert not harness.check_at(109.0)
    assert len(harness.check_at(111.0)) == 1


def test_watchdog_reports_device_error_at_once():
    harness = WatchdogHarness()

    def fails() -> bool:
        raise RuntimeError("NCCL communicator was aborted\nlong trace")

    harness.watchdog.track("vectors.all_to_all", fails)
    (error,) = harness.check_at(0.1)
    assert "A peer was lost in vectors.all_to_all: NCCL communicator was aborted" in error
    assert "long trace" not in error


def test_watchdog_covers_blocking_collectives():
    harness = WatchdogHarness()

    class BlockingGroup:
        """Process group whose all-reduce blocks because a peer was lost, as the host needs the result."""

        def all_reduce(self, tensor: torch.Tensor) -> None:
            assert not harness.check_at(9.0)
            assert len(harness.check_at(11.0)) == 1
            raise RuntimeError("the process has ended")

    keys = Communicator("keys", 0, 2, None, CollectiveLog(), BlockingGroup(), watchdog=harness.watchdog)
    with pytest.raises(PeerLostError):
        all_reduce_sum(keys, torch.zeros(1))
    assert "A peer was lost in keys.all_reduce: no response within 10 s" in harness.errors[0]
    assert harness.check_at(40.0) == harness.errors[:1], "the call has returned"


def test_collective_out_of_memory_is_not_a_lost_peer():
    class OutOfMemoryGroup:
        def all_reduce(self, tensor: torch.Tensor) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    vectors = Communicator("vectors", 0, 2, None, CollectiveLog(), OutOfMemoryGroup())
    with pytest.raises(torch.OutOfMemoryError):
        all_reduce_sum(vectors, torch.zeros(1))
