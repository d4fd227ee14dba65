"""Loaded by the server that tests fork ranks from: loops of training that are compiled already, once for all ranks.

Each of hundreds of ranks would read them from the cache beside the modules, a third of a second of its own.

Ranks for tests, on CPUs or sharing GPUs: processes that are started once and run one function after another.

Ranks as threads of one process, for tests of what ranks agree on through `gather`.
"""

import importlib
import os
import pkgutil
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any, TypeVar

import torch
from numba.core.dispatcher import Dispatcher

import nestrec.embedding.optimizers
import nestrec.pipeline.schedules
from nestrec.checkpoint import CheckpointGroup
from nestrec.distributed.topology import ParallelConfig, Topology
from nestrec_bench.harness.local_ranks import rank_context

CHOSEN_BY_NAME = (nestrec.embedding.optimizers, nestrec.pipeline.schedules)
FOLDERS = ("balance", "data.samples", "data.gather", "embedding", "ops.rows", "ops.losses", "pipeline", "tasks")


def compiled_loops() -> Iterator[Dispatcher]:
    """Of the modules of these folders that are loaded."""
    beginnings = tuple(f"nestrec.{folder}" for folder in FOLDERS)
    for name, module in list(sys.modules.items()):
        if name.startswith(beginnings):
            found = (value for value in vars(module).values() if isinstance(value, Dispatcher))
            yield from (loop for loop in found if loop.py_func.__module__ == name)


def load_compiled(loop: Dispatcher) -> None:
    """For all types that it was compiled for."""
    for arguments, *_ in loop._cache._cache_file._load_index():  # type: ignore[attr-defined]
        loop.compile(arguments)


for _folder in CHOSEN_BY_NAME:
    for _module in pkgutil.iter_modules(_folder.__path__, f"{_folder.__name__}."):
        importlib.import_module(_module.name)
for _loop in compiled_loops():
    load_compiled(_loop)


_START_TIMEOUT_S = 100.0


def loaded_context() -> ForkServerContext | SpawnContext:
    """How tests start processes: forked from one that has loaded torch, trainer, server and compiled loops."""
    return rank_context("nestrec.training.trainer", "nestrec.serving.server", "support.rank_pool")


@dataclass(frozen=True, slots=True)
class RankFailure:
    """What a rank said when its function raised, or that it died."""

    rank: int
    kind: str
    """Name of the exception's class, or `died`."""
    text: str


class RankPool:
    """`world` processes; `run` calls a picklable function on each as `function(topology, *args)`."""

    def __init__(
        self, world: int, ranks: ParallelConfig | None = None, *, timeout_s: float = 60.0, device: str = "cpu"
    ) -> None:
        """device: `cuda` where the ranks share the GPUs of this machine."""
        self._folder = tempfile.TemporaryDirectory(prefix="nestrec-ranks-")
        context = loaded_context()
        threads, os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS"), "1"
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            mine, theirs = context.Pipe()
            meeting = str(Path(self._folder.name) / "meeting")
            args = (rank, world, ranks, timeout_s, device, meeting, theirs)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = threads
        self._raise_failures(self._collect(_START_TIMEOUT_S))

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Results in rank order; an AssertionError with every rank's traceback where any rank failed."""
        outcomes = self.outcomes(function, *args)
        self._raise_failures(outcomes)
        return outcomes

    def outcomes(self, function: Callable[..., Any], *args: Any, timeout_s: float = 100.0) -> list[Any]:
        """Results or RankFailures in rank order."""
        for pipe in self._pipes:
            pipe.send((function, args))
        return self._collect(timeout_s)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def _collect(self, timeout_s: float) -> list[Any]:
        outcomes = []
        for rank, pipe in enumerate(self._pipes):
            try:
                answered = pipe.poll(timeout_s)
                outcomes.append(pipe.recv() if answered else RankFailure(rank, "silent", f"no answer in {timeout_s} s"))
            except (EOFError, ConnectionResetError):
                outcomes.append(RankFailure(rank, "died", "the process ended"))
        return outcomes

    @staticmethod
    def _raise_failures(outcomes: list[Any]) -> None:
        failed = [o for o in outcomes if isinstance(o, RankFailure)]
        if failed:
            raise AssertionError("\n".join(f"rank {f.rank}: {f.kind}: {f.text}" for f in failed))


def _serve(  # noqa: PLR0917
    rank: int, world: int, ranks: ParallelConfig | None, timeout_s: float, device: str, meeting: str, pipe: Connection
) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    place = torch.device(device)
    if device == "cuda":
        place = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(place)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timeout)
    topology = Topology.of_process_group(place, ranks, timeout_s=timeout_s)
    pipe.send("ready")
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)  # the pool is gone, and so may be the peers: nothing to take leave of
        pipe.send(_call(rank, function, topology, args))


def _call(rank: int, function: Callable[..., Any], topology: Topology, args: tuple[Any, ...]) -> Any:
    try:
        return function(topology, *args)
    except Exception as error:
        return RankFailure(rank, type(error).__name__, f"{error}\n{traceback.format_exc()}")


T = TypeVar("T")


def run_ranks(world: int, work: Callable[[CheckpointGroup], T]) -> list[T | Exception]:
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
            results[rank] = work(CheckpointGroup(rank=rank, world=world, gather=gather))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
