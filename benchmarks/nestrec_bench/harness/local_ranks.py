"""Ranks on this machine: processes connected by Gloo, with one compute thread each.

The processes are forked from a server process that has imported torch but not computed anything, because importing
torch takes seconds. Ranks of one server use the same hash seed of strings; with NESTREC_RANKS_START=spawn, each rank is
a new interpreter.

The fork server imports this module last. The module then initializes numba once for all ranks, and excludes all loaded
objects from garbage collection, since a collection in a rank would copy their memory pages.
"""

import contextlib
import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

from numba.core.registry import cpu_target

from nestrec.base.errors import UserError

cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
gc.freeze()


_TIMEOUT_S = 600.0


def rank_context(*loaded: str) -> ForkServerContext | SpawnContext:
    """Return the multiprocessing context in which ranks are started.

    Args:
        *loaded: Modules that the ranks need. Those of the first call are imported by the fork server, once for all
            ranks.
    """
    if os.environ.get("NESTREC_RANKS_START") == "spawn":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", *loaded, "nestrec_bench.harness.local_ranks"])
    return context


def run_on_ranks(
    world: int, function: Callable[..., Any], *args: Any, enter: Callable[[int], None] | None = None
) -> list[Any]:
    """Call `function(topology, *args)` on each of `world` new processes, and return the results in rank order.

    Args:
        world: Number of ranks.
        function: Picklable function, for example a function of a module.
        *args: Its further arguments.
        enter: Function that is called with the rank before the process group is initialized.

    Raises:
        UserError: A rank raised an error or exited.
    """
    context = rank_context(function.__module__)
    with tempfile.TemporaryDirectory(prefix="nestrec-bench-") as folder, _one_thread():
        pipes = []
        processes = []
        for rank in range(world):
            parent_end, child_end = context.Pipe()
            work = (rank, world, str(Path(folder) / "rendezvous"), child_end, function, args, enter)
            process = context.Process(target=_run, args=work, daemon=True)
            process.start()
            child_end.close()
            pipes.append(parent_end)
            processes.append(process)
        results = [_receive_result(rank, pipe) for rank, pipe in enumerate(pipes)]
        for process in processes:
            process.join()
    return results


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Start new processes with one compute thread each, because benchmarks vary the number of processes."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _receive_result(rank: int, pipe: Connection) -> Any:
    try:
        has_succeeded, result = pipe.recv()
    except EOFError:
        has_succeeded = False
        result = "the process exited"
    if not has_succeeded:
        remedy = "see the error above; a rank needs memory and a free core"
        raise UserError(f"rank {rank} failed: {result}", option="ranks", value=rank, remedy=remedy)
    return result


def _run(  # noqa: PLR0917
    rank: int,
    world: int,
    rendezvous: str,
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    enter: Callable[[int], None] | None,
) -> None:
    if enter is not None:
        enter(rank)
    import torch
    import torch.distributed as dist

    from nestrec.distributed import Topology

    torch.set_num_threads(1)
    limit = timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=limit)
    try:
        topology = Topology.of_process_group(torch.device("cpu"), timeout_s=_TIMEOUT_S)
        result = (True, function(topology, *args))
    except Exception:
        result = (False, traceback.format_exc())
    pipe.send(result)
    os._exit(0)  # skips the shutdown of the process group: peers may be gone after a failure
