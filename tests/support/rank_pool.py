"""Ranks for tests: `RankPool` starts processes, on CPUs or sharing GPUs, and `run_ranks` uses threads of one process.

The processes are started once and run one function after another. They are forked from a server that has imported this
module, which loads the compiled host loops of training once for all ranks. Otherwise, each of hundreds of ranks would
read the loops from numba's cache, which takes a third of a second per rank. Ranks that are threads are enough for tests
of agreement through `gather`.
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
    """Yield the numba functions of the loaded modules in `FOLDERS`."""
    prefixes = tuple(f"nestrec.{folder}" for folder in FOLDERS)
    for name, module in list(sys.modules.items()):
        if name.startswith(prefixes):
            loops = (value for value in vars(module).values() if isinstance(value, Dispatcher))
            yield from (loop for loop in loops if loop.py_func.__module__ == name)


def load_compiled(loop: Dispatcher) -> None:
    """Load a loop from numba's cache for all argument types that it was compiled for."""
    for arguments, *_ in loop._cache._cache_file._load_index():  # type: ignore[attr-defined]
        loop.compile(arguments)


for _folder in CHOSEN_BY_NAME:
    for _module in pkgutil.iter_modules(_folder.__path__, f"{_folder.__name__}."):
        importlib.import_module(_module.name)
for _loop in compiled_loops():
    load_compiled(_loop)


_START_TIMEOUT_S = 100.0


def preloaded_context() -> ForkServerContext | SpawnContext:
    """Return a context whose processes are forked from one with torch, trainer, server and compiled loops loaded."""
    return rank_context("nestrec.training.trainer", "nestrec.serving.server", "support.rank_pool")


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Failure of a rank: an exception of its function, the end of its process, or a timeout."""

    rank: int
    kind: str
    """Name of the exception's class, `died`, or `silent` after a timeout."""
    text: str
    """Message and traceback."""


class RankPool:
    """A pool of `world` rank processes; `run` calls a picklable function on each as `function(topology, *args)`."""

    def __init__(
        self, world: int, ranks: ParallelConfig | None = None, *, timeout_s: float = 60.0, device: str = "cpu"
    ) -> None:
        """Start the processes.

        Args:
            world: Number of ranks.
            ranks: Options of the topology.
            timeout_s: Time limit of collectives.
            device: `cpu`, or `cuda` to share the GPUs of this machine among the ranks.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="nestrec-ranks-")
        context = preloaded_context()
        threads, os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS"), "1"
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            parent_end, child_end = context.Pipe()
            rendezvous = str(Path(self._folder.name) / "rendezvous")
            args = (rank, world, ranks, timeout_s, device, rendezvous, child_end)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            child_end.close()
            self._pipes.append(parent_end)
            self._processes.append(process)
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = threads
        self._raise_failures(self._collect(_START_TIMEOUT_S))

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return the results in rank order.

        Raises:
            AssertionError: If a rank failed; with the tracebacks of all ranks that failed.
        """
        outcomes = self.outcomes(function, *args)
        self._raise_failures(outcomes)
        return outcomes

    def outcomes(self, function: Callable[..., Any], *args: Any, timeout_s: float = 100.0) -> list[Any]:
        """Return the result or the `RankFailure` of each rank, in rank order."""
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
                has_result = pipe.poll(timeout_s)
                timed_out = RankFailure(rank, "silent", f"no result after {timeout_s} s")
                outcomes.append(pipe.recv() if has_result else timed_out)
            except (EOFError, ConnectionResetError):
                outcomes.append(RankFailure(rank, "died", "the process ended"))
        return outcomes

    @staticmethod
    def _raise_failures(outcomes: list[Any]) -> None:
        failed = [o for o in outcomes if isinstance(o, RankFailure)]
        if failed:
            raise AssertionError("\n".join(f"rank {f.rank}: {f.kind}: {f.text}" for f in failed))


def _serve(  # noqa: PLR0917
    rank: int,
    world: int,
    ranks: ParallelConfig | None,
    timeout_s: float,
    device_name: str,
    rendezvous: str,
    pipe: Connection,
) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    device = torch.device(device_name)
    if device_name == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=timeout)
    topology = Topology.of_process_group(device, ranks, timeout_s=timeout_s)
    pipe.send("ready")
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)  # the pool has been closed, and peers may have exited, so there is no orderly shutdown
        pipe.send(_call(rank, function, topology, args))


def _call(rank: int, function: Callable[..., Any], topology: Topology, args: tuple[Any, ...]) -> Any:
    try:
        return function(topology, *args)
    except Exception as error:
        return RankFailure(rank, type(error).__name__, f"{error}\n{traceback.format_exc()}")


T = TypeVar("T")


def run_ranks(world: int, work: Callable[[CheckpointGroup], T]) -> list[T | Exception]:
    """Run `work` on one thread per rank and return the result or the exception of each."""
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
