"""Coordinates the writing of an artifact: agreement of all ranks on success, and a background writer thread.

`CheckpointGroup` lets the ranks that write one checkpoint agree on its success. `BackgroundWorker` runs one task at a
time on a separate thread and raises the error of a task in the next call.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from nestrec.base.errors import NonFiniteError, UserError
from nestrec.base.thread_team import ThreadTeam, set_niceness
from nestrec.distributed import Communicator, Topology
from nestrec.distributed.collectives import all_gather_json
from nestrec.distributed.rendezvous import watch_rendezvous
from nestrec.trace.tracer import CollectiveLog

NICENESS = 15
"""Niceness of threads that write while training runs. If there is no spare core, each takes about 3% of a training
core.
"""


class BackgroundWorker:
    """Runs one function at a time on a background thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._team: ThreadTeam | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Start `work`; the previous work must have been joined."""
        assert self._thread is None
        # Not a daemon thread: a program that exits without `join` still completes the write.
        self._thread = threading.Thread(target=self._run, args=(work,), name="nestrec-checkpoint")
        self._thread.start()

    def join(self) -> None:
        """Wait for the running work and raise its error, if any."""
        if self._thread is not None:
            if self._team is not None:
                self._team.set_niceness(0)  # the caller is blocked now, so the writer should be fast
            self._thread.join()
            self._thread = self._team = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, work: Callable[[], object]) -> None:
        own = threading.get_native_id()
        # Without permission to lower the niceness again, the thread would stay slow even when `join` waits for it.
        if set_niceness(own, 1) and set_niceness(own, 0):
            set_niceness(own, NICENESS)
            self._team = ThreadTeam.current()
        try:
            work()
        except BaseException as error:  # raised again by `join`
            self._error = error


T = TypeVar("T")


class CheckpointSaveError(UserError):
    """A checkpoint could not be written; the last one is intact. Raised on all ranks."""


def _gather_alone(value: Any) -> list[Any]:
    return [value]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointGroup:
    """Ranks that save or restore together."""

    rank: int = 0
    """Index of this rank."""
    world: int = 1
    """Number of ranks."""
    gather: Callable[[Any], list[Any]] = _gather_alone
    """Function that returns the JSON-compatible values of all ranks in rank order (all-gather). Background saves call
    it from their own thread, so it needs a communicator that nothing else uses.
    """

    @staticmethod
    def of_topology(topology: Topology, *, timeout_s: float = 1800.0) -> "CheckpointGroup":
        """Create the group of all ranks of a run, with its own communicator. Collective.

        Args:
            topology: Topology of the run.
            timeout_s: Time that the fastest rank waits for the slowest one to write its files before that rank counts
                as lost, in seconds.
        """
        if topology.world == 1:
            return CheckpointGroup()
        with watch_rendezvous():
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        topology.extra_groups.append(group)
        # A separate log: background saves are not part of the order of collectives that ranks compare.
        own = Communicator("checkpoint", topology.rank, topology.world, group, CollectiveLog())
        return CheckpointGroup(
            rank=topology.rank, world=topology.world, gather=lambda value: all_gather_json(own, value)
        )

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank."""
        return self.rank == 0

    def run_on_first_rank(self, action: Callable[[], T], problem: str) -> T:
        """Run `action` on the first rank and return its result on all ranks; errors as for `run_on_all_ranks`."""
        results: list[Any] = self.run_on_all_ranks(action if self.is_first else lambda: None, problem)
        result: T = results[0]
        return result

    def run_on_all_ranks(self, action: Callable[[], T], problem: str) -> list[T]:
        """Run `action` on every rank and return the results of all ranks; if a rank fails, raise on all ranks.

        Args:
            action: Function to run.
            problem: Start of the error message.

        Raises:
            NonFiniteError: A rank has raised a NonFiniteError.
            CheckpointSaveError: A rank has raised any other error.
        """
        result: T | None = None
        failure: Exception | None = None
        try:
            result = action()
        except Exception as error:  # any error, because the other ranks must not wait forever
            failure = error
        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        outcomes = self.gather((result, text, isinstance(failure, NonFiniteError)))
        failed = [f"rank {rank}: {text}" for rank, (_, text, _) in enumerate(outcomes) if text is not None]
        if any(is_not_finite for _, _, is_not_finite in outcomes):
            remedy = "resume with a lower learning rate"
            text = f"{problem}: {'; '.join(failed)}; the run stops, and the last checkpoint is intact"
            raise NonFiniteError(text, remedy=remedy) from failure
        if failed:
            remedy = "fix the cause (disk space, permissions) and resume from the last checkpoint, which is intact"
            raise CheckpointSaveError(f"{problem}: {'; '.join(failed)}", remedy=remedy) from failure
        return [value for value, _, _ in outcomes]
