"""Ranks that write one artifact and agree on its success, and a background writer.

One piece of work at a time on a thread of its own; its error waits for whoever asks next.

The ranks that write one checkpoint together, and how they agree on its success.
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
from nestrec.distributed.rendezvous import meeting_watched
from nestrec.trace.tracer import CollectiveLog

NICENESS = 15
"""Of threads that write while others train: where they leave them no core of their own, each takes 3% of theirs."""


class BackgroundWorker:
    """Runs one function at a time in the background."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._team: ThreadTeam | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Start `work`; the work before it must have been joined."""
        assert self._thread is None
        # Not a daemon: a program that ends without `join` still finishes what it began to write.
        self._thread = threading.Thread(target=self._run, args=(work,), name="nestrec-checkpoint")
        self._thread.start()

    def join(self) -> None:
        """Wait for the work in flight and raise its error, if any."""
        if self._thread is not None:
            if self._team is not None:
                self._team.set_niceness(0)  # somebody waits
            self._thread.join()
            self._thread = self._team = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, work: Callable[[], object]) -> None:
        own = threading.get_native_id()
        # Who may not come back would be left behind by every other process, also when somebody waits.
        if set_niceness(own, 1) and set_niceness(own, 0):
            set_niceness(own, NICENESS)
            self._team = ThreadTeam.of_thread()
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
    """Who takes part in a save or restore."""

    rank: int = 0
    """This rank."""
    world: int = 1
    """Number of ranks."""
    gather: Callable[[Any], list[Any]] = _gather_alone
    """Gives every rank the JSON-like values of all ranks, in rank order. Saves in the background call it from
    their own thread, so it needs a communicator that nothing else uses."""

    @staticmethod
    def of_topology(topology: Topology, *, timeout_s: float = 1800.0) -> "CheckpointGroup":
        """The ranks of a run, with a communicator of their own; every rank must call it.

        timeout_s: how long the fastest rank waits for the slowest to write its files before it counts as lost.
        """
        if topology.world == 1:
            return CheckpointGroup()
        with meeting_watched():
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        topology.more_groups.append(group)
        # A log of its own: the order of saves in the background is no part of the order that ranks compare.
        own = Communicator("checkpoint", topology.rank, topology.world, group, CollectiveLog())
        return CheckpointGroup(
            rank=topology.rank, world=topology.world, gather=lambda value: all_gather_json(own, value)
        )

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def on_first(self, action: Callable[[], T], problem: str) -> T:
        """Run `action` on the first rank; its result, or an error as of `agree`, on all ranks."""
        results: list[Any] = self.agree(action if self.is_first else lambda: None, problem)
        result: T = results[0]
        return result

    def agree(self, action: Callable[[], T], problem: str) -> list[T]:
        """Run `action` on every rank; the results of all ranks, or an error on all of them when one has failed.

        That is a `NonFiniteError` where one was raised, else a `CheckpointSaveError`.
        """
        result: T | None = None
        failure: Exception | None = None
        try:
            result = action()
        except Exception as error:  # whatever it is, the other ranks must not be left waiting
            failure = error
        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        answers = self.gather((result, text, isinstance(failure, NonFiniteError)))
        failed = [f"rank {rank}: {text}" for rank, (_, text, _) in enumerate(answers) if text is not None]
        if any(is_not_finite for _, _, is_not_finite in answers):
            remedy = "resume with a smaller learning rate"
            text = f"{problem}: {'; '.join(failed)}: the run stops, the last checkpoint is intact"
            raise NonFiniteError(text, remedy=remedy) from failure
        if failed:
            remedy = "mend the cause (free disk space, permissions) and go on from the last checkpoint, which is intact"
            raise CheckpointSaveError(f"{problem}: {'; '.join(failed)}", remedy=remedy) from failure
        return [value for value, _, _ in answers]
