"""Rows of 16 bits have the same bits on any number of ranks, in every store, under every exact schedule."""

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
WAYS = ["nested", "priority"]
"""rows updated all at once, and in two portions"""
CASES = [
    *((*values, 1) for values in pairwise_cover({name: FACTORS[name] for name in ("optimizer", "dtype", "store")})),
    ("rowwise_adagrad", "bfloat16", "dram", 2),
    ("adam", "float16", "device", 2),
    ("rowwise_adam", "bfloat16", "disk", 4),
]
"""every pair on one rank, which is quick; the full grid is slow"""


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
def test_exact_schedules_equal_serial_bit_for_bit_on_rows_of_16_bits(pools, tmp_path, values):
    check_equality(pools, tmp_path, values, 6, WAYS)


@pytest.mark.slow
@pytest.mark.parametrize("values", list(itertools.product(*FACTORS.values())), ids=str)
def test_exact_schedules_equal_serial_on_rows_of_16_bits_on_the_full_grid(pools, tmp_path, values):
    check_equality(pools, tmp_path, values, 40, EXACT)


def learned(topology: Topology, optimizer: str, dtype: str, store: str, folder: str) -> tuple[list[str], int]:
    """Digests after some steps, and the bytes of vectors and gradients that left this rank.

    A step has four pieces with gradients of their own. Piece m * world + r is micro-batch m of rank r, so the owner
    adds them in the same order whatever the ranks, and rounding alone could tell them apart.
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
        mine = range(topology.rank, NUM_PIECES, topology.world)
        drawn = [np.random.default_rng([step, piece]).permutation(80)[:20] for piece in mine]
        routed = engine.route(*({"a": keys, "b": keys * 2**50 - 7} for keys in drawn))
        working = engine.fetch(routed, step=step)
        for number, piece in enumerate(mine):
            vectors = engine.exchange_vectors(routed, working, number)
            micro_batch = routed.micro_batches[number]
            gradients = {}
            for name, asked in (("a", drawn[number]), ("b", drawn[number] * 2**50 - 7)):
                assert vectors[name].dtype == tables[0].weight_dtype
                keys = torch.empty(len(asked), 1, dtype=torch.int64)  # distinct, in the order of the index
                keys[micro_batch.index[name].long(), 0] = torch.from_numpy(asked % 1009)
                gradients[name] = torch.sin((keys * DIM + torch.arange(DIM)) * (step + 0.1 * piece)).float()
            engine.accumulate(routed, working, gradients, number)
        engine.update(working, learning_rate=0.02)
        engine.write_back(working)
    result = [engine.digest(name) for name in engine.tables], engine.statistics.vectors.bytes_sent
    engine.close()
    return result


@pytest.mark.parametrize(("optimizer", "dtype"), [("rowwise_adagrad", "bfloat16"), ("adam", "float16")])
def test_rows_of_16_bits_have_the_same_bits_on_1_2_and_4_ranks_and_in_every_store(pools, tmp_path, optimizer, dtype):
    expected, _ = learned(Topology.single(), optimizer, dtype, "device", "")
    for world, store in [(2, "dram"), (4, "device"), (4, "disk")]:
        folder = tmp_path / f"{world}{store}"
        Path(folder).mkdir()
        assert {tuple(digests) for digests, _ in pools[world].run(learned, optimizer, dtype, store, str(folder))} == {
            tuple(expected)
        }


def test_rows_of_16_bits_cross_with_half_the_bytes(pools):
    sent = {
        dtype: sum(count for _, count in pools[2].run(learned, "sgd", dtype, "device", ""))
        for dtype in ("float32", "bfloat16")
    }
    assert sent["float32"] == 2 * sent["bfloat16"] > 0


def test_copies_of_rows_of_16_bits_stay_alike_where_gradients_cross_between_replica_groups(pools):
    job = Job(dtype="bfloat16", optimizer="rowwise_adagrad", num_steps=8, ranks=ParallelConfig(replicas=2))
    serial, nested = (pools[2].run(train, schedule, job) for schedule in ("serial", "nested"))
    assert serial[0]["tables"] == serial[1]["tables"] == nested[0]["tables"] == nested[1]["tables"]


@pytest.mark.parametrize("schedule", ["serial", "nested", "semi_async"])
def test_a_resumed_run_on_rows_of_16_bits_equals_one_that_went_on(schedule):
    common: dict[str, Any] = {"num_steps": 12, "dtype": "float16", "optimizer": "rowwise_adam"}
    whole = train(Topology.single(), schedule, Job(fences=(5,), **common))
    cut = train(Topology.single(), schedule, Job(restart_after=5, **common))
    assert all(whole[name] == cut[name] for name in ("tables", "dense", "losses"))
