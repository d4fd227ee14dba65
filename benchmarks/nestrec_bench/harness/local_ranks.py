"""Real ranks on this machine: processes joined by Gloo, one thread of computing each.

They are forked from a server that has loaded torch and computed nothing, as importing it takes seconds of every
process. Ranks of one server hash strings alike; with NESTREC_RANKS_START=spawn each is an interpreter of its own.

Loaded last by the server that ranks are forked from: what numba sets up at its first use, once for all of them.

What is loaded by now is never garbage: a rank that looked through it would copy all of its pages.
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
    """How ranks are started. loaded: modules that they need; those of the first call are loaded once for all ranks."""
    if os.environ.get("NESTREC_RANKS_START") == "spawn":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", *loaded, "nestrec_bench.harness.local_ranks"])
    return context


def run_on_ranks(
    world: int, function: Callable[..., Any], *args: Any, enter: Callable[[int], None] | None = None
) -> list[Any]:
    """`function(topology, *args)` on each of `world` new processes; what they return, in rank order.

    The function is picklable: it stands at the top of a module. enter: called with the rank before the ranks meet.
    """
    context = rank_context(function.__module__)
    with tempfile.TemporaryDirectory(prefix="nestrec-bench-") as folder, _one_thread():
        pipes, processes = [], []
        for rank in range(world):
            mine, theirs = context.Pipe()
            work = (rank, world, str(Path(folder) / "meeting"), theirs, function, args, enter)
            process = context.Process(target=_run, args=work, daemon=True)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        answers = [_answer(rank, pipe) for rank, pipe in enumerate(pipes)]
        for process in processes:
            process.join()
    return answers


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """New processes compute with one thread: their number is what a benchmark varies."""
    before, os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS"), "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _answer(rank: int, pipe: Connection) -> Any:
    try:
        is_good, answer = pipe.recv()
    except EOFError:
        is_good = False
        answer = "the process ended"
    if not is_good:
        remedy = "see the error above; a rank needs memory and a free core"
        raise UserError(f"rank {rank} failed: {answer}", option="ranks", value=rank, remedy=remedy)
    return answer


def _run(  # noqa: PLR0917
    rank: int,
    world: int,
    meeting: str,
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
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=limit)
    try:
        topology = Topology.of_process_group(torch.device("cpu"), timeout_s=_TIMEOUT_S)
        answer = (True, function(topology, *args))
    except Exception:
        answer = (False, traceback.format_exc())
    pipe.send(answer)
    os._exit(0)  # peers may be gone after a failure: nothing to take leave of
