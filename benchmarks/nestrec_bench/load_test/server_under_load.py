"""Open-loop load test of a server in its own process: results of the requests, and resource usage of the server."""

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
from nestrec.base.process import gc_disabled
from nestrec.serving.fleet.readiness_probes import free_port, is_listening
from nestrec_bench.load_test.load_test import LoadTestConfig, RequiredInputs, synthetic_request
from nestrec_bench.load_test.open_loop import Trial, nearest_rank, poisson_arrivals
from nestrec_bench.load_test.socket_load import LoadOutcome, SocketLoad, post

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ServedLoadResult:
    """Result of a load test of a server."""

    at_s: Floats
    """Intended send times, in seconds from the start."""
    trial: Trial
    refusal_ms: Floats
    """Time from sending to the response of rejected requests; NaN for other requests."""
    num_without_retry: int
    """Number of rejections without a Retry-After header."""
    rss_before: int
    rss_after: int
    server_cores: float
    """CPU time of the server, divided by the duration of the load."""

    @property
    def completed_ms(self) -> Floats:
        """Sorted latencies of successful requests."""
        return np.sort(self.trial.latency_ms[np.isfinite(self.trial.latency_ms)])

    @property
    def rejected_ms(self) -> Floats:
        """Sorted response times of rejected requests."""
        return np.sort(self.refusal_ms[~np.isnan(self.refusal_ms)])


@contextlib.contextmanager
def server(folder: Path, *options: str) -> Iterator[tuple[int, psutil.Process]]:
    """Start `nestrec serve` in its own process, and yield its port and process when it is ready."""
    port = free_port()
    command = [sys.executable, "-m", "nestrec", "serve", "--model", str(folder), "--port", str(port), *options]
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=errors)
        try:
            while not is_listening(port):
                if child.poll() is not None:
                    errors.seek(0)
                    output = errors.read().decode(errors="replace")[-2000:]
                    problem = f"the server exited at its start: {output}"
                    remedy = "see the message of the server"
                    raise UserError(problem, option="nestrec serve", value=str(folder), remedy=remedy)
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
    """Send requests at their intended times, and wait for all responses.

    Args:
        port: Port of the server.
        process: Process of the server.
        at_s: Send times, in seconds from the start.
        bodies: Request bodies.
        polls: Whether the client polls its sockets without sleeping.
        path: Path of the requests.
    """
    requests = [post(path, body) for body in bodies]
    before = process.memory_info().rss
    cpu_s = _cpu_s(process)
    start_s = time.perf_counter()
    with gc_disabled():
        outcome = SocketLoad(port, polls=polls).run(at_s, requests)
    cores = (_cpu_s(process) - cpu_s) / (time.perf_counter() - start_s)
    is_rejected = np.isin(outcome.status, (429, 503))
    return ServedLoadResult(
        at_s=at_s,
        trial=_trial(at_s, outcome),
        rss_before=before,
        rss_after=process.memory_info().rss,
        refusal_ms=np.where(is_rejected, (outcome.ended_s - outcome.sent_s) * 1e3, np.nan),
        num_without_retry=int((is_rejected & ~outcome.has_retry_after).sum()),
        server_cores=cores,
    )


def _trial(at_s: Floats, outcome: LoadOutcome) -> Trial:
    latency_ms = np.where(outcome.status == 200, (outcome.ended_s - at_s) * 1e3, np.inf)
    span_s = max(float(at_s[-1]), 1e-9) if len(at_s) else 1.0
    late_ms = float(np.quantile(outcome.sent_s - at_s, 0.99)) * 1e3 if len(at_s) else 0.0
    return Trial(len(at_s) / span_s, latency_ms, late_ms, span_s)


def synthetic_load(
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
    """Return send times with Poisson arrivals, and synthetic request bodies, one per user.

    Args:
        rate: Requests per second.
        duration_s: Duration of the load, in seconds.
        first_user: Number of the first user.
        history: Number of events per history.
        candidates: Number of candidates.
        items: Number of items from which histories and candidates are drawn.
        timeout_ms: Timeout of the requests.
        seed: Random seed.
        reads: Inputs that the model requires.
        k: Number of recommended items; if it is not 0, the requests are for recommendations instead of scores.
    """
    at_s = poisson_arrivals(rate, duration_s, seed)
    cfg = LoadTestConfig(num_candidates=candidates, seed=seed)
    bodies = []
    for user in range(first_user, first_user + len(at_s)):
        _, body = synthetic_request(user, history, cfg, np.random.default_rng(user), reads, items=range(1, items + 1))
        if k:
            body = {"k": k, **{name: body[name] for name in ("user", "history", "now_ms")}}
        bodies.append(orjson.dumps({**body, "timeout_ms": timeout_ms}))
    return at_s, bodies


def quantile(ordered: Floats, q: float) -> float | None:
    """Return a percentile of sorted values, or None if there are no values."""
    return round(nearest_rank(ordered, q), 3) if len(ordered) else None


def _cpu_s(process: psutil.Process) -> float:
    """Return the CPU time of a server and its child processes, in seconds."""
    all_times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(times.user + times.system for times in all_times))
