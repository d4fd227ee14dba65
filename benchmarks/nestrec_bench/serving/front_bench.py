"""Measure the cost of HTTP: ranking requests on a model with almost no computation.

nestrec bench front --rate 500 --candidates 256 --duration_s 20
nestrec bench front --rate 60 --history 2048 --frontend_workers 1,2
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
from nestrec_bench.load_test.server_under_load import ServedLoadResult, quantile, serve_load, server, synthetic_load

_NUM_ITEMS = 1000
_WARM_S = 2.0


@config
class FrontBenchConfig:
    rate: float = 500.0
    """Request rate in requests/s."""
    candidates: int = 256
    """Number of candidates per request."""
    history: int = 1
    """Number of events per request; the model uses the last ones."""
    frontend_workers: tuple[int, ...] = (1,)
    """Numbers of frontend workers; one server per number, which take turns."""
    duration_s: float = 10.0
    """Duration of each load in seconds."""
    rounds: int = 3
    """Number of loads per kind of client, one row each."""
    clients: tuple[str, ...] = ("polls", "sleeps")
    """Kinds of clients. polls: the client never sleeps, so that latencies contain wake-ups of the server only; sleeps:
    they contain those of the client too."""
    seed: int = 0
    """Seed of arrivals and users."""


def measure_front(bench: FrontBenchConfig) -> list[dict[str, Any]]:
    """Measure latencies from the intended send time to the complete response, with clients on the same machine."""
    encoder = HSTUConfig(dim=4, num_layers=1, num_heads=1, head_dim=4, max_length=16, position_bias=False)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "model"
        write_servable(random_retrieval(encoder, num_items=_NUM_ITEMS), folder)
        rows: list[dict[str, Any]] = []
        with contextlib.ExitStack() as servers:
            running = {
                count: servers.enter_context(server(folder, "--frontend_workers", str(count)))
                for count in bench.frontend_workers
            }
            for port, process in running.values():
                _serve(port, process, bench, _WARM_S, 0, polls=False)
            for number, (client, count) in itertools.product(
                range(bench.rounds), itertools.product(bench.clients, bench.frontend_workers)
            ):
                (port, process) = running[count]
                polls = client == "polls"
                before_s = _cpu_s(process)
                served = _serve(port, process, bench, bench.duration_s, len(rows) + 1, polls=polls)
                cpu_ms = 1e3 * (_cpu_s(process) - before_s) / len(served.at_s)
                row = _row(client, number + 1, served, bench)
                rows.append({**row, "front_processes": count, "computing_process_ms": round(cpu_ms, 3)})
    return rows


def _cpu_s(process: psutil.Process) -> float:
    """Return the processor time of the engine process, without its frontend workers."""
    times = process.cpu_times()
    return float(times.user + times.system)


def _serve(
    port: int, process: psutil.Process, bench: FrontBenchConfig, duration_s: float, number: int, *, polls: bool
) -> ServedLoadResult:
    load = synthetic_load(
        bench.rate, duration_s, first_user=number << 32, history=bench.history, candidates=bench.candidates,
        items=_NUM_ITEMS, timeout_ms=1000, seed=bench.seed + number, reads=RequiredInputs(),
    )  # fmt: skip
    return serve_load(port, process, *load, polls=polls)


def _row(client: str, number: int, served: ServedLoadResult, bench: FrontBenchConfig) -> dict[str, Any]:
    ordered = served.completed_ms
    return {
        "client": client, "round": number, "rate": bench.rate, "candidates": bench.candidates,
        "history": bench.history, "requests": len(served.at_s), "answered": len(ordered),
        "p50_ms": quantile(ordered, 50), "p90_ms": quantile(ordered, 90), "p99_ms": quantile(ordered, 99),
        "server_cores": round(served.server_cores, 2), "generator_late_p99_ms": round(served.trial.lateness_ms, 3),
    }  # fmt: skip


BENCH = Bench(config=FrontBenchConfig, measure=measure_front)
