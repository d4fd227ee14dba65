"""Measure the search for the best items of a catalog: fused pass on a GPU, exact search on a CPU, and faiss with
recall.

nestrec bench retrieval --items 1000000,10000000 --batch 1,16,64 --device cuda --dtype bfloat16
nestrec bench retrieval --items 100000 --batch 1,16 --kinds exact,faiss_hnsw,faiss_ivf
nestrec bench retrieval --items 1000000 --rates 500,1000 --device cuda --instances 1,4        # over HTTP
nestrec bench retrieval --items 1000000 --users 100000 --device cuda          # batch inference
"""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from nestrec.base.config import config
from nestrec.exporters.servable_writer import write_servable
from nestrec.inference.batch_inference import BatchJobConfig
from nestrec.inference.recommender import load
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.model.item_search import (
    NUM_SPARE_ROWS,
    ExactSearch,
    ExcludedRows,
    ItemSearch,
    SearchConfig,
    best_of_part,
)
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.served_tables import DeviceTable
from nestrec_bench.bench import Bench
from nestrec_bench.harness.random_model import random_retrieval
from nestrec_bench.kernels.kernel_timing import medians_ms
from nestrec_bench.load_test.load_test import fetch_required_inputs
from nestrec_bench.load_test.server_under_load import quantile, serve_load, server, synthetic_load

_CLUSTERS = 1024


@config
class RetrievalBenchConfig:
    items: tuple[int, ...] = (100_000,)
    """Numbers of rows of the index."""
    dim: int = 128
    """Embedding dimension of a row."""
    k: int = 100
    """Number of items to find per request."""
    batch: tuple[int, ...] = (1, 16)
    """Numbers of requests per search."""
    seen: int = 50
    """Number of items that are excluded from the results of each request."""
    kinds: tuple[str, ...] = ("exact",)
    """Kinds of search: exact, faiss_hnsw, faiss_ivf."""
    search: SearchConfig = SearchConfig()
    """Options of faiss."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the index."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the rows."""
    rounds: int = 100
    """Number of timed batches."""
    rates: tuple[float, ...] = ()
    """Request rates over HTTP in requests/s: `/v1/recommend` of a model with almost no computation in its encoder is
    measured instead of the search."""
    duration_s: float = 5.0
    """Duration of each rate in seconds."""
    instances: tuple[int, ...] = (1,)
    """Numbers of server processes over HTTP, behind a gateway if there are several; servers take turns at each rate."""
    users: int = 0
    """Number of users whose best items batch inference writes to a file; if it is not 0, this is measured instead."""
    seed: int = 0
    """Seed of rows and queries."""


def measure_retrieval(bench: RetrievalBenchConfig) -> Iterator[dict[str, Any]]:
    """Yield the rows of all searches.

    The rows of the index are clustered around centers, as those of a trained model are; the recall of faiss is higher
    for such rows than for random ones.
    """
    for num_items in bench.items:
        if bench.rates or bench.users:
            with tempfile.TemporaryDirectory() as root:
                write_servable(_model(bench, num_items), Path(root) / "model")
                yield from (_over_http if bench.rates else _in_batches)(bench, num_items, Path(root))
            continue
        torch.manual_seed(bench.seed)
        centers = torch.randn(_CLUSTERS, bench.dim, device=bench.device)
        rows, queries = (_around(centers, count, getattr(torch, bench.dtype)) for count in (num_items, 1024))
        exact = _search(bench, "exact", rows)
        searches = dict[str, ItemSearch]()
        labels = dict[str, dict[str, Any]]()
        for kind in bench.kinds:
            start_s = time.perf_counter()
            searches[kind] = exact if kind == "exact" else _search(bench, kind, rows)
            build_s = round(time.perf_counter() - start_s, 1)
            recall = _recall(searches[kind], exact, queries[:200], bench.k)
            labels[kind] = {**_labels(bench, num_items, kind), "recall": recall, "build_s": build_s}
        for batch in bench.batch:
            for kind, times in _measure_searches(bench, searches, rows, queries, batch).items():
                yield {**labels[kind], "batch": batch, **times}


def _measure_searches(
    bench: RetrievalBenchConfig, searches: dict[str, ItemSearch], rows: torch.Tensor, queries: torch.Tensor, batch: int
) -> dict[str, dict[str, Any]]:
    """Measure all kinds of search, which take turns batch by batch.

    `over_exact` is the speed relative to exact search: the median over batches, with quartiles.
    """
    rng = np.random.default_rng(bench.seed)
    ms = {kind: list[float]() for kind in searches}
    for number in range(bench.rounds + 3):
        chosen = queries[torch.from_numpy(rng.integers(0, len(queries), batch)).to(queries.device)]
        excluded = ExcludedRows.of([rng.integers(1, len(rows), bench.seen) for _ in range(batch)])
        for kind, search in searches.items():
            start_s = time.perf_counter()
            search.best(chosen, bench.k, excluded)
            ms[kind] += [(time.perf_counter() - start_s) * 1e3] if number >= 3 else []
    found = {}
    for kind, times_ms in ms.items():
        ordered = np.sort(times_ms)
        qps = round(1e3 * batch / float(np.mean(times_ms)), 1)
        p50_ms, p99_ms = (quantile(ordered, q) for q in (50, 99))
        found[kind] = {"device_ms": None, "qps": qps, "p50_ms": p50_ms, "p99_ms": p99_ms}
        if kind != "exact" and "exact" in ms:
            low, middle, high = np.quantile(np.array(ms["exact"]) / np.array(times_ms), (0.25, 0.5, 0.75)).round(2)
            found[kind] |= {"over_exact": middle, "over_exact_low": low, "over_exact_high": high}
    if bench.device == "cuda" and "exact" in ms:
        pass_ = partial(
            best_of_part, queries[:batch], rows, 0, bench.k + NUM_SPARE_ROWS, excluded.to_device(rows.device)
        )
        found["exact"]["device_ms"] = round(medians_ms([lambda _: pass_()], 20)[0], 4)
    return found


def _model(bench: RetrievalBenchConfig, num_items: int) -> Servable:
    encoder = HSTUConfig(dim=bench.dim, num_layers=1, num_heads=1, head_dim=16, max_length=64, position_bias=False)
    return random_retrieval(encoder, num_items=num_items, seed=bench.seed, dtype=getattr(torch, bench.dtype))


def _over_http(bench: RetrievalBenchConfig, num_items: int, root: Path) -> Iterator[dict[str, Any]]:
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        starting = [pool.submit(stack.enter_context, _server(bench, root, count)) for count in bench.instances]
        servers = [one.result() for one in starting]
        for number, rate in enumerate((bench.rates[0], *bench.rates)):
            for count, (port, process) in zip(bench.instances, servers, strict=True):
                load = synthetic_load(
                    rate, bench.duration_s if number else 2.0, first_user=number << 32, history=bench.seen,
                    candidates=1, items=num_items, timeout_ms=1000, seed=number, k=bench.k,
                    reads=fetch_required_inputs(f"http://127.0.0.1:{port}"),
                )  # fmt: skip
                served = serve_load(port, process, *load, polls=bench.device == "cuda", path="/v1/recommend")
                ordered = served.completed_ms
                labels = {**_labels(bench, num_items, "exact"), "http": True}
                row = {"instances": count, "rate": rate, "requests": len(served.at_s),
                       "qps": round(served.trial.goodput(10.0), 1), "p50_ms": quantile(ordered, 50),
                       "p99_ms": quantile(ordered, 99), "refused": len(served.rejected_ms),
                       "server_cores": round(served.server_cores, 2),
                       "generator_late_p99_ms": round(served.trial.lateness_ms, 3)}  # fmt: skip
                if number:
                    yield labels | row


def _server(bench: RetrievalBenchConfig, root: Path, count: int) -> AbstractContextManager[tuple[int, psutil.Process]]:
    several = ("--num_instances", str(count), "--load_balancer", "gateway") if count > 1 else ()
    return server(root / "model", "--device", bench.device, *several)


def _in_batches(bench: RetrievalBenchConfig, num_items: int, root: Path) -> Iterator[dict[str, Any]]:
    """Measure batch inference from a file of histories to a file of items three times, without loading the model."""
    rng = np.random.default_rng(bench.seed)
    histories = rng.integers(1, num_items + 1, (bench.users, bench.seen))
    times = np.broadcast_to(np.arange(bench.seen) * 60_000, histories.shape)
    columns = {"user": [f"u{user}" for user in range(bench.users)], "items": list(histories), "times_ms": list(times)}
    pq.write_table(pa.table(columns), root / "users.parquet")
    batch = load(str(root / "model"), device=bench.device).batch(BatchJobConfig(k=bench.k))
    for number in range(1, 4):
        start_s = time.perf_counter()
        count = batch.recommend(str(root / "users.parquet"), root / f"recommended-{number}.parquet")
        seconds = time.perf_counter() - start_s
        yield {**_labels(bench, num_items, "exact"), "users": count, "round": number, "seconds": round(seconds, 2),
               "users_a_second": round(count / seconds, 1)}  # fmt: skip


def _labels(bench: RetrievalBenchConfig, num_items: int, kind: str) -> dict[str, Any]:
    return {"items": num_items, "dim": bench.dim, "k": bench.k, "search": kind, "exact": kind == "exact",
            "device": bench.device, "dtype": bench.dtype, "seen": bench.seen}  # fmt: skip


def _around(centers: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    rows = torch.empty(count, centers.shape[1], dtype=dtype, device=centers.device)
    for part in rows.split(1 << 20):
        own = centers[torch.randint(0, len(centers), (len(part),), device=centers.device)]
        part.copy_(torch.nn.functional.normalize(own + torch.randn_like(own)))
    return rows


def _search(bench: RetrievalBenchConfig, kind: str, rows: torch.Tensor) -> ItemSearch:
    if kind == "exact" and rows.is_cuda:
        from nestrec.serving.model.item_search import GraphSearch

        return GraphSearch(DeviceTable(rows))
    if kind == "exact":
        return ExactSearch(DeviceTable(rows))
    from nestrec.serving.model.faiss_search import FaissSearch, build_index

    cfg = replace(bench.search, kind=kind)  # type: ignore[arg-type]
    return FaissSearch(rows, cfg, build_index(rows, cfg))


def _recall(search: ItemSearch, exact: ItemSearch, queries: torch.Tensor, k: int) -> float:
    found, expected = (one.best(queries, k, ExcludedRows.of([]))[0] for one in (search, exact))
    return round(float(np.mean([len(np.intersect1d(a, b)) / k for a, b in zip(found, expected, strict=True)])), 4)


BENCH = Bench(config=RetrievalBenchConfig, measure=measure_retrieval)
