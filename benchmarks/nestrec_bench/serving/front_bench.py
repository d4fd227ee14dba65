"""What HTTP itself costs: ranking requests on a model that computes next to nothing.

nestrec bench front --rate 500 --candidates 256 --duration_s 20
nestrec bench front --rate 60 --history 2048 --front_processes 1,2
"""

import contextlib
import itertools
import tempfile
from pathlib import Path
from typing import Any

import psutil

from nestrec.base.config import config
from nestrec.exporters.servable_writer import write_servable
from nestrec.models.hstu import HSTUConfig
from nestrec_bench.bench import Bench
from nestrec_bench.harness.random_model import random_retrieval
from nestrec_bench.load_test.load_test import RequiredInputs
from nestrec_bench.load_test.server_under_load import ServedLoadResult, made_up_load, quantile, serve_load, server

_NUM_ITEMS = 1000
_WARM_S = 2.0


@config
class FrontBench:
    rate: float = 500.0
    """requests a second"""
    candidates: int = 256
    """items of a request"""
    history: int = 1
    """events of a request; the model reads the last ones"""
    front_processes: tuple[int, ...] = (1,)
    """servers with so many of them, measured in turns"""
    duration_s: float = 10.0
    """how long each load lasts"""
    rounds: int = 3
    """loads of each kind of client, a row each"""
    clients: tuple[str, ...] = ("polls", "sleeps")
    """polls: never sleeps, so that only the server's wake-ups are in the latencies; sleeps: its own are in them too"""
    seed: int = 0
    """of arrivals and users"""


def measure_front(bench: FrontBench) -> list[dict[str, Any]]:
    """Latency from the intended moment to the whole answer, by clients on the same machine, in turns."""
    encoder = HSTUConfig(dim=4, num_layers=1, num_heads=1, head_dim=4, max_length=16, position_bias=False)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "model"
        write_servable(random_retrieval(encoder, num_items=_NUM_ITEMS), folder)
        rows: list[dict[str, Any]] = []
        with contextlib.ExitStack() as servers:
            running = {
                count: servers.enter_context(server(folder, "--front_processes", str(count)))
                for count in bench.front_processes
            }
            for place in running.values():
                _served(*place, bench, _WARM_S, 0, polls=False)
            for number, (client, count) in itertools.product(
                range(bench.rounds), itertools.product(bench.clients, bench.front_processes)
            ):
                (port, process) = running[count]
                polls = client == "polls"
                before_s = _cpu_s(process)
                served = _served(port, process, bench, bench.duration_s, len(rows) + 1, polls=polls)
                took_ms = 1e3 * (_cpu_s(process) - before_s) / len(served.at_s)
                row = _row(client, number + 1, served, bench)
                rows.append({**row, "front_processes": count, "computing_process_ms": round(took_ms, 3)})
    return rows


def _cpu_s(process: psutil.Process) -> float:
    """Of the process that was started, and of none of its fronts."""
    times = process.cpu_times()
    return float(times.user + times.system)


def _served(
    port: int, process: psutil.Process, bench: FrontBench, duration_s: float, number: int, *, polls: bool
) -> ServedLoadResult:
    load = made_up_load(
        bench.rate, duration_s, first_user=number << 32, history=bench.history, candidates=bench.candidates,
        items=_NUM_ITEMS, timeout_ms=1000, seed=bench.seed + number, reads=RequiredInputs(),
    )  # fmt: skip
    return serve_load(port, process, *load, polls=polls)


def _row(client: str, number: int, served: ServedLoadResult, bench: FrontBench) -> dict[str, Any]:
    ordered = served.answered_ms
    return {
        "client": client, "round": number, "rate": bench.rate, "candidates": bench.candidates,
        "history": bench.history, "requests": len(served.at_s), "answered": len(ordered),
        "p50_ms": quantile(ordered, 50), "p90_ms": quantile(ordered, 90), "p99_ms": quantile(ordered, 99),
        "server_cores": round(served.server_cores, 2), "generator_late_p99_ms": round(served.trial.lateness_ms, 3),
    }  # fmt: skip


BENCH = Bench(config=FrontBench, measure=measure_front)
