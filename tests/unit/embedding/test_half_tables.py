"""Tables with 16-bit weights: their updates, and the options that they do not support."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine, RowOptimizerConfig, TableConfig
from nestrec.embedding.optimizer_checks import draws_of
from nestrec.embedding.routing.replica_key_union import check_weight_averaging
from nestrec.embedding.row_optimizer import ROW_OPTIMIZERS, RowOptimizerSpec, RowStep, update_by_formula
from nestrec.embedding.table_config import layout_of
from nestrec.embedding.table_shard import TableOptimizer
from nestrec.ops.embedding.stochastic_rounding import round_stochastically

NUM_ROWS, DIM = 1100, 7  # more rows than a host loop processes at once


def table_of(kind: str = "adam", dtype: str = "bfloat16", **more: object) -> TableConfig:
    return TableConfig(name="t", dim=DIM, dtype=dtype, optimizer=RowOptimizerConfig(kind=kind, eps=1e-6), **more)


def train_rows(table: TableConfig, *implementations: str) -> list[torch.Tensor]:
    """Return the rows after three steps with each implementation."""
    layout = layout_of(table)
    keys = np.arange(NUM_ROWS) * 2**41 - 77
    results = []
    for implementation in implementations:
        torch.manual_seed(0)
        rows = torch.zeros(NUM_ROWS, layout.num_words, dtype=torch.int32)
        layout.view(rows, "weight").copy_(torch.randn(NUM_ROWS, DIM))
        for number in range(1, 4):
            grad = torch.randn(NUM_ROWS, DIM)
            draws = torch.from_numpy(draws_of(table, keys, number))
            step = RowStep(number, 0.01, table.optimizer, draws)
            if implementation == "host":
                TableOptimizer(table, layout).update_on_host(rows, grad, step)
            elif implementation == "formula":
                weight, *states = (layout.view(rows, column.name) for column in layout.columns)
                update_by_formula(table.optimizer.spec, weight, states, grad, step, None)
            elif implementation == "some":  # in another order, with an index that updates no row
                order = torch.randperm(NUM_ROWS)
                rows_to_update = torch.cat([order, torch.tensor([-1])])
                shuffled = torch.cat([grad[order], torch.ones(1, DIM)])
                shuffled_step = RowStep(number, 0.01, table.optimizer, torch.cat([draws[order], draws[:1]]))
                TableOptimizer(table, layout).update_on_device(rows, shuffled, shuffled_step, rows_to_update)
            else:
                TableOptimizer(table, layout).update_on_device(rows, grad, step)
            torch.manual_seed(number)  # the same gradients, independently of other random draws
        results.append(rows)
    return results


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", list(ROW_OPTIMIZERS))
def test_half_precision_implementations_are_bitwise_equal(kind, dtype):
    host, *others = train_rows(table_of(kind, dtype), "host", "operator", "formula", "some")
    assert all(torch.equal(host, other) for other in others)


def test_half_precision_float32_kernel_is_rounded_after(monkeypatch):
    """A kernel of another package computes in float32, and unchanged rows must remain bitwise identical."""
    ours = ROW_OPTIMIZERS.find("adam")

    def kernel(weight, states, grad, rows, step):
        assert weight.dtype == torch.float32
        ours.kernel(weight, states, grad, rows, step)

    foreign = replace(ours, kernel=kernel, kernel_rounds=False)
    expected = train_rows(table_of("adam"), "operator", "some")
    monkeypatch.setattr(RowOptimizerConfig, "spec", property(lambda options: foreign))
    assert isinstance(foreign, RowOptimizerSpec)
    assert all(
        torch.equal(a, b) for a, b in zip(train_rows(table_of("adam"), "operator", "some"), expected, strict=True)
    )


def test_half_precision_rounding_depends_on_seed_table_step_key():
    keys = np.array([5, -3, 2**62])
    base = draws_of(table_of(), keys, 4)
    assert np.array_equal(draws_of(table_of("sgd", "float16"), keys[::-1].copy(), 4)[::-1], base)
    others = [
        draws_of(table_of(seed=1), keys, 4),
        draws_of(replace(table_of(), name="u"), keys, 4),
        draws_of(table_of(), keys, 5),
        draws_of(table_of(), keys + 1, 4),
    ]
    assert len({int(n) for draws in [base, *others] for n in draws}) == 15


def test_half_precision_small_updates_are_unbiased():
    """With rounding to nearest, the weights would never change."""
    table = table_of("sgd")
    layout = layout_of(table)
    rows = torch.zeros(400, layout.num_words, dtype=torch.int32)
    layout.view(rows, "weight").fill_(1.0)
    for step in range(1, 51):  # each update is a sixteenth of the distance from 1 to the next smaller number
        draws = torch.from_numpy(draws_of(table, np.arange(400), step))
        gradient = torch.full((400, DIM), 2.0**-12)
        TableOptimizer(table, layout).update_on_host(rows, gradient, RowStep(step, 1.0, table.optimizer, draws))
    moved = 1 - layout.view(rows, "weight").double().mean()
    assert abs(float(moved) - 50 * 2.0**-12) < 3e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_rows_are_exchanged_with_16_bits(dtype):
    engine = EmbeddingEngine([table_of("rowwise_adagrad", dtype)], Topology.single())
    routed = engine.route({"t": np.array([1, 2, 7])})
    working = engine.fetch_rows(routed, step=1)
    vectors = engine.exchange_vectors(routed, working)["t"]
    assert vectors.dtype == engine.tables["t"].weight_dtype
    assert engine.statistics.vector_bytes == 3 * 4 * ((DIM + 1) // 2), "rows are sent as 32-bit words"
    engine.accumulate(routed, working, {"t": torch.ones(3, DIM)})
    before = working.tables["t"].layout.columns_of(working.tables["t"].fetched.rows)["weight"]
    engine.update(working, learning_rate=0.01)
    engine.write_back(working)
    read = engine.lookup_readonly({"t": np.array([1, 2, 7])})["t"]
    assert read.dtype == torch.float32
    draws = torch.from_numpy(draws_of(engine.tables["t"], np.array([1, 2, 7]), 1))
    expected = round_stochastically(
        before.float() - torch.tensor(0.01) * (1.0 / (1.0 + torch.tensor(1e-6))), draws, before.dtype
    )
    assert torch.equal(read, expected.float())


def test_half_precision_rejects_unsupported_combinations():
    half = {"features": ("a", "b"), "half_precision_features": ("b",)}
    with pytest.raises(UserError, match="already sent in 16 bits"):
        EmbeddingEngine([table_of(**half)], Topology.single())
    with pytest.raises(UserError, match="mean of 16-bit weights"):
        check_weight_averaging([table_of()])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_half_precision_row_size_in_bytes(optimizer, dtype):
    half, full = layout_of(table_of(optimizer, dtype)), layout_of(table_of(optimizer, "float32"))
    assert full.row_bytes - half.row_bytes in (8, 16)
    assert {column.dtype for column in half.columns[1:]} <= {torch.float32}
