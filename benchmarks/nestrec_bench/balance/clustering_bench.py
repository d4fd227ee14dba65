"""Count the rows that are transferred for each clustering into micro-batches, with and without the window cache.

Without the cache, the rows are counted from the partition. With it, they are read from the counters of the embedding
engine, which routes the same batches and exchanges their vectors.

    nestrec bench clustering turbogr-kuai data/ml-1m-ordered --rounds 3
"""

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nestrec.base.config import config
from nestrec.base.config_values import Count
from nestrec.data.batch_order import epoch_order
from nestrec.data.dataset import Dataset
from nestrec.data.synthetic.synthetic_logs import generate, preset
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine, TableConfig
from nestrec.pipeline.key_clustering import Clustering, SampleKeys, cluster, inflation
from nestrec_bench.bench import Bench

CLUSTERINGS: tuple[Clustering, ...] = ("contiguous", "random", "by_length", "greedy", "refined", "edges")


def measure_clustering(
    data: str, *, batch: int = 512, micro_batches: Sequence[int] = (4, 8, 16, 32), rounds: int = 5, seed: int = 0
) -> list[dict[str, Any]]:
    """Measure each clustering for each number of micro-batches.

    Args:
        data: A preset or the folder of a prepared dataset.
        batch: Number of samples per rank.
        micro_batches: Numbers of micro-batches.
        rounds: Number of batches to average over.
        seed: Random seed of the sample order.

    Returns:
        One row per number of micro-batches and clustering.
    """
    batches = _batches(data, batch, rounds, seed)
    rows = []
    for num_micro_batches in micro_batches:
        for name in CLUSTERINGS:
            found = [_measure(name, keys, num_micro_batches) for keys in batches]
            means = {field: round(statistics.fmean(one[field] for one in found), 4) for field in found[0]}
            rows.append(
                {
                    "data": Path(data).name,
                    "batch": batch,
                    "micro_batches": num_micro_batches,
                    "clustering": name,
                    **means,
                }
            )
    return rows


def short_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with the columns that fit a terminal."""
    names = {
        "data": "data", "micro_batches": "N", "clustering": "by", "sent_over_unique": "sent",
        "cached_over_unique": "cached", "first_keys": "first", "last_keys": "last", "cost_over_mean": "load",
        "cluster_ms": "ms",
    }  # fmt: skip
    return [{short: row[name] for name, short in names.items()} for row in rows]


def _measure(name: Clustering, keys: SampleKeys, num_micro_batches: int) -> dict[str, float]:
    cost = np.diff(keys.offsets).astype(np.float64)
    cluster(name, keys, cost, num_micro_batches)  # the first call may compile
    start_s = time.perf_counter()
    groups = cluster(name, keys, cost, num_micro_batches)
    duration_ms = 1000 * (time.perf_counter() - start_s)
    found = inflation(keys, groups)
    loads = [cost[group].sum() for group in groups]
    return {
        "unique_keys": found.unique,
        "sent_over_unique": found.ratio,
        "cached_over_unique": _sent_with_cache(keys, groups) / found.unique,
        "first_keys": found.first,
        "last_keys": found.last,
        "cost_over_mean": max(loads) / (sum(loads) / num_micro_batches),
        "cluster_ms": duration_ms,
        "keys": float(len(keys.values)),
    }


def _sent_with_cache(keys: SampleKeys, groups: Sequence[Any]) -> int:
    """Return the number of vectors that are sent with the window cache, from the counters of the engine."""
    engine = EmbeddingEngine([TableConfig(name="items", dim=1)], Topology.single())
    samples = np.split(keys.values, keys.offsets[1:-1])
    parts = [{"items": np.concatenate([samples[i] for i in group] or [keys.values[:0]])} for group in groups]
    routed = engine.route(*parts, window_cache=True)
    working = engine.fetch_rows(routed, step=1)
    for part in range(len(parts)):
        engine.exchange_vectors(routed, working, part)
    total = engine.statistics.vectors.rows
    engine.close()
    return total


def _batches(data: str, batch: int, rounds: int, seed: int) -> list[SampleKeys]:
    """Return the item ids of users as batches of one rank."""
    with tempfile.TemporaryDirectory(prefix="nestrec-clustering-") as folder:
        path = Path(data)
        if not path.is_dir():
            path = Path(folder) / "data"
            generate(preset(data, num_users=batch * rounds, num_items=preset(data).num_items), path)
        dataset = Dataset.open(path, columns=["item_ids"])
        order = epoch_order(dataset.num_samples, seed, 0)[: batch * rounds]
        chunks = [dataset.rows(order[i : i + batch]) for i in range(0, len(order), batch)]
    return [SampleKeys(*rows.lists["item_ids"]) for rows in chunks if rows.num_rows == batch]


@config
class ClusteringBenchConfig:
    """Options of the benchmark."""

    data: tuple[str, ...] = ("turbogr-kuai",)
    """Presets or folders of prepared datasets."""
    batch: Count = 512
    """Number of samples per rank and step."""
    rounds: Count = 5
    """Number of batches to average over."""


def _rows(bench: ClusteringBenchConfig) -> Iterator[dict[str, Any]]:
    for name in bench.data:
        yield from measure_clustering(name, batch=bench.batch, rounds=bench.rounds)


TITLE = "vectors sent / unique keys of the batch (column cached: with the window cache)"
BENCH = Bench(
    config=ClusteringBenchConfig,
    measure=_rows,
    show=lambda rows, more: [(TITLE, short_rows(rows))],
    argument="data",
)
