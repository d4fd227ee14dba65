"""A server in a process of its own under open-loop load: what became of each request, and what the server used."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import psutil
from numpy.typing import NDArray

from nestrec.base.errors import UserError
from nestrec.base.process import uncollected
from nestrec.serving.fleet.readiness_probes import free_port, listens
from nestrec_bench.load_test.load_test import LoadTestConfig, RequiredInputs, made_up_request
from nestrec_bench.load_test.open_loop import Trial, nearest_rank, poisson_arrivals
from nestrec_bench.load_test.socket_load import LoadOutcome, SocketLoad, post

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ServedLoadResult:
    """A load and its answers."""

    at_s: Floats
    """intended moments, from the start"""
    trial: Trial
    refusal_ms: Floats
    """of requests that were refused, from sending to the answer; not a number for the others"""
    num_without_retry: int
    """refusals that do not say when to come back"""
    rss_before: int
    rss_after: int
    server_cores: float
    """processor time of the server over the time of the load"""

    @property
    def answered_ms(self) -> Floats:
        """Latencies of those that were answered, in order."""
        return np.sort(self.trial.latency_ms[np.isfinite(self.trial.latency_ms)])

    @property
    def refused_ms(self) -> Floats:
        return np.sort(self.refusal_ms[~np.isnan(self.refusal_ms)])


@contextlib.contextmanager
def server(folder: Path, *options: str) -> Iterator[tuple[int, psutil.Process]]:
    """`nestrec serve` in a process of its own, ready."""
    port = free_port()
    command = [sys.executable, "-m", "nestrec", "serve", "--model", str(folder), "--port", str(port), *options]
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=errors)
        try:
            while not listens(port):
                if child.poll() is not None:
                    errors.seek(0)
                    told = errors.read().decode(errors="replace")[-2000:]
                    raise UserError("ended before it served", option="nestrec serve", value=str(folder), remedy=told)
                time.sleep(0.05)
            yield port, psutil.Process(child.pid)
        finally:
            child.terminate()
            child.wait()


def serve_load(
    port: int,
    process: psutil.Process,
    at_s: Floats,
    bodies: Sequence[bytes],
    *,
    polls: bool = False,
    path: str = "/v1/rank",
) -> ServedLoadResult:
    """Send requests at their moments and wait for all answers. polls: with a client that never sleeps."""
    requests = [post(path, body) for body in bodies]
    before = process.memory_info().rss
    cpu_s = _cpu_s(process)
    start_s = time.perf_counter()
    with uncollected():
        outcome = SocketLoad(port, polls=polls).run(at_s, requests)
    cores = (_cpu_s(process) - cpu_s) / (time.perf_counter() - start_s)
    is_refused = np.isin(outcome.status, (429, 503))
    return ServedLoadResult(
        at_s=at_s,
        trial=_trial(at_s, outcome),
        rss_before=before,
        rss_after=process.memory_info().rss,
        refusal_ms=np.where(is_refused, (outcome.ended_s - outcome.sent_s) * 1e3, np.nan),
        num_without_retry=int((is_refused & ~outcome.says_when).sum()),
        server_cores=cores,
    )


def _trial(at_s: Floats, outcome: LoadOutcome) -> Trial:
    latency_ms = np.where(outcome.status == 200, (outcome.ended_s - at_s) * 1e3, np.inf)
    span_s = max(float(at_s[-1]), 1e-9) if len(at_s) else 1.0
    late_ms = float(np.quantile(outcome.sent_s - at_s, 0.99)) * 1e3 if len(at_s) else 0.0
    return Trial(len(at_s) / span_s, latency_ms, late_ms, span_s)


def made_up_load(
    rate: float,
    duration_s: float,
    *,
    first_user: int,
    history: int,
    candidates: int,
    items: int,
    timeout_ms: int,
    seed: int,
    reads: RequiredInputs,
    k: int = 0,
) -> tuple[Floats, list[bytes]]:
    """Poisson arrivals of users of whom none returns. k: they ask for so many items instead of scores of candidates."""
    at_s = poisson_arrivals(rate, duration_s, seed)
    cfg = LoadTestConfig(candidates=candidates, seed=seed)
    bodies = []
    for user in range(first_user, first_user + len(at_s)):
        _, body = made_up_request(user, history, cfg, np.random.default_rng(user), reads, items=range(1, items + 1))
        if k:
            body = {"k": k, **{name: body[name] for name in ("user", "history", "now_ms")}}
        bodies.append(orjson.dumps({**body, "timeout_ms": timeout_ms}))
    return at_s, bodies


def quantile(ordered: Floats, q: float) -> float | None:
    """None of nothing."""
    return round(nearest_rank(ordered, q), 3) if len(ordered) else None


def _cpu_s(process: psutil.Process) -> float:
    """Of a server and the instances behind it."""
    all_times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(times.user + times.system for times in all_times))
