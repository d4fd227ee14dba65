"""Half-precision rows are bitwise identical on any number of ranks, in every store, under every exact schedule."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from schedule_jobs import Job, train
from test_schedules import EXACT, equality_with_serial, pairwise_cover

from nestrec.distributed import Topology
from nestrec.distributed.topology import ParallelConfig
from nestrec.embedding import EmbeddingEngine, RowOptimizerConfig, StoreConfig, TableConfig
from nestrec.embedding.row_optimizer import ROW_OPTIMIZERS

NUM_PIECES, NUM_STEPS, DIM = 4, 5, 6
FACTORS: dict[str, list[Any]] = {
    "optimizer": list(ROW_OPTIMIZERS),
    "dtype": ["bfloat16", "float16"],
    "store": ["device", "dram", "disk"],
    "world": [1, 2, 4],
}
MAIN_SCHEDULES = ["nested", "priority"]
"""Schedules that update rows all at once and in two portions."""
CASES = [
    *((*values, 1) for values in pairwise_cover({name: FACTORS[name] for name in ("optimizer", "dtype", "store")})),
    ("rowwise_adagrad", "bfloat16", "dram", 2),
    ("adam", "float16", "device", 2),
    ("rowwise_adam", "bfloat16", "disk", 4),
]
"""Every pair of values on one rank, which is fast; the full grid is slow."""


def check_equality(pools, tmp_path, values: tuple[Any, ...], num_steps: int, schedules: list[str]) -> None:
    optimizer, dtype, store, world = values
    job = Job(
        optimizer=optimizer,
        dtype=dtype,
        store=store,
        folder=str(tmp_path),
        num_steps=num_steps,
        fences=(num_steps // 2,),
    )
    assert equality_with_serial(pools, world, job, schedules) == [dict.fromkeys(schedules, True)] * world


@pytest.mark.parametrize("values", CASES, ids=str)
def test_half_precision_rows_schedules_equal_serial(pools, tmp_path, values):
    check_equality(pools, tmp_path, values, 6, MAIN_SCHEDULES)


@pytest.mark.slow
@pytest.mark.parametrize("values", list(itertools.product(*FACTORS.values())), ids=str)
def test_half_precision_rows_schedules_equal_serial_full_grid(pools, tmp_path, values):
    check_equality(pools, tmp_path, values, 40, EXACT)


def train_rows(topology: Topology, optimizer: str, dtype: str, store: str, folder: str) -> tuple[list[str], int]:
    """Return the digests after some steps, and the bytes of vectors that this rank sent.

    A step has four pieces with different gradients. Piece m * world + r is micro-batch m of rank r, so the owner adds
    them in the same order on any number of ranks, and only rounding could lead to different results.
    """
    common: dict[str, Any] = {
        "dim": DIM,
        "dtype": dtype,
        "optimizer": RowOptimizerConfig(kind=optimizer),
        "store": StoreConfig(kind=store, folder=folder, cache_rows=16),
    }
    tables = [TableConfig(name="a", num_rows=80, seed=1, **common), TableConfig(name="b", seed=1, **common)]
    engine = EmbeddingEngine(tables, topology)
    for step in range(1, NUM_STEPS + 1):
        pieces = range(topology.rank, NUM_PIECES, topology.world)
        piece_keys = [np.random.default_rng([step, piece]).permutation(80)[:20] for piece in pieces]
        routed = engine.route(*({"a": keys, "b": keys * 2**50 - 7} for keys in piece_keys))
        working = engine.fetch_rows(routed, step=step)
        for number, piece in enumerate(pieces):
            vectors = engine.exchange_vectors(routed, working, number)
            micro_batch = routed.micro_batches[number]
            gradients = {}
            for name, looked_up in (("a", piece_keys[number]), ("b", piece_keys[number] * 2**50 - 7)):
                assert vectors[name].dtype == tables[0].weight_dtype
                keys = torch.empty(len(looked_up), 1, dtype=torch.int64)  # unique keys, in the order of the index
                keys[micro_batch.index[name].long(), 0] = torch.from_numpy(looked_up % 1009)
                gradients[name] = torch.sin((keys * DIM + torch.arange(DIM)) * (step + 0.1 * piece)).float()
            engine.accumulate(routed, working, gradients, number)
        engine.update(working, learning_rate=0.02)
        engine.write_back(working)
    result = [engine.digest(name) for name in engine.tables], engine.statistics.vectors.bytes_sent
    engine.close()
    return result


@pytest.mark.parametrize(("optimizer", "dtype"), [("rowwise_adagrad", "bfloat16"), ("adam", "float16")])
def test_half_precision_rows_equal_on_1_2_4_ranks_and_stores(pools, tmp_path, optimizer, dtype):
    expected, _ = train_rows(Topology.single(), optimizer, dtype, "device", "")
    for world, store in [(2, "dram"), (4, "device"), (4, "disk")]:
        folder = tmp_path / f"{world}{store}"
        Path(folder).mkdir()
        ranks = pools[world].run(train_rows, optimizer, dtype, store, str(folder))
        assert {tuple(digests) for digests, _ in ranks} == {tuple(expected)}


def test_half_precision_rows_halve_bytes_sent(pools):
    sent = {
        dtype: sum(count for _, count in pools[2].run(train_rows, "sgd", dtype, "device", ""))
        for dtype in ("float32", "bfloat16")
    }
    assert sent["float32"] == 2 * sent["bfloat16"] > 0


def test_half_precision_rows_replicas_stay_equal(pools):
    job = Job(dtype="bfloat16", optimizer="rowwise_adagrad", num_steps=8, ranks=ParallelConfig(num_replicas=2))
    serial, nested = (pools[2].run(train, schedule, job) for schedule in ("serial", "nested"))
    assert serial[0]["tables"] == serial[1]["tables"] == nested[0]["tables"] == nested[1]["tables"]


@pytest.mark.parametrize("schedule", ["serial", "nested", "semi_async"])
def test_half_precision_rows_resumed_run_is_exact(schedule):
    common: dict[str, Any] = {"num_steps": 12, "dtype": "float16", "optimizer": "rowwise_adam"}
    uninterrupted = train(Topology.single(), schedule, Job(fences=(5,), **common))
    resumed = train(Topology.single(), schedule, Job(restart_after=5, **common))
    assert all(uninterrupted[name] == resumed[name] for name in ("tables", "dense", "losses"))
