"""Rows of 16 bits: how they are updated, and what they are refused with."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine, RowOptimizerConfig, TableConfig
from nestrec.embedding.optimizer_checks import draws_of
from nestrec.embedding.routing.replica_key_union import check_tables_can_differ
from nestrec.embedding.row_optimizer import ROW_OPTIMIZERS, RowOptimizerSpec, RowStep, update_by_formula
from nestrec.embedding.table_config import layout_of
from nestrec.embedding.table_shard import TableOptimizer
from nestrec.ops.embedding.stochastic_rounding import rounded

NUM_ROWS, DIM = 1100, 7  # more rows than a host loop has at a time


def table_of(kind: str = "adam", dtype: str = "bfloat16", **more: object) -> TableConfig:
    return TableConfig(name="t", dim=DIM, dtype=dtype, optimizer=RowOptimizerConfig(kind=kind, eps=1e-6), **more)


def stepped(table: TableConfig, *ways: str) -> list[torch.Tensor]:
    """Rows after three steps, each way of making them."""
    layout = layout_of(table)
    keys = np.arange(NUM_ROWS) * 2**41 - 77
    results = []
    for way in ways:
        torch.manual_seed(0)
        rows = torch.zeros(NUM_ROWS, layout.num_words, dtype=torch.int32)
        layout.view(rows, "weight").copy_(torch.randn(NUM_ROWS, DIM))
        for number in range(1, 4):
            grad = torch.randn(NUM_ROWS, DIM)
            draws = torch.from_numpy(draws_of(table, keys, number))
            step = RowStep(number, 0.01, table.optimizer, draws)
            if way == "host":
                TableOptimizer(table, layout).update_on_host(rows, grad, step)
            elif way == "formula":
                weight, *states = (layout.view(rows, column.name) for column in layout.columns)
                update_by_formula(table.optimizer.spec, weight, states, grad, step, None)
            elif way == "some":  # in another order, with a row that stays
                order = torch.randperm(NUM_ROWS)
                places = torch.cat([order, torch.tensor([-1])])
                shuffled = torch.cat([grad[order], torch.ones(1, DIM)])
                told = RowStep(number, 0.01, table.optimizer, torch.cat([draws[order], draws[:1]]))
                TableOptimizer(table, layout).update_on_device(rows, shuffled, told, places)
            else:
                TableOptimizer(table, layout).update_on_device(rows, grad, step)
            torch.manual_seed(number)  # the same gradients whatever was drawn between
        results.append(rows)
    return results


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", list(ROW_OPTIMIZERS))
def test_loop_formula_and_operator_round_alike_to_the_bit(kind, dtype):
    host, *others = stepped(table_of(kind, dtype), "host", "operator", "formula", "some")
    assert all(torch.equal(host, other) for other in others)


def test_a_kernel_that_knows_whole_weights_alone_is_rounded_for(monkeypatch):
    """As one of another package: it is given float32, and rows that it leaves alone stay to the bit."""
    ours = ROW_OPTIMIZERS.find("adam")

    def kernel(weight, states, grad, places, step):
        assert weight.dtype == torch.float32
        ours.kernel(weight, states, grad, places, step)

    foreign = replace(ours, kernel=kernel, kernel_rounds=False)
    expected = stepped(table_of("adam"), "operator", "some")
    monkeypatch.setattr(RowOptimizerConfig, "spec", property(lambda options: foreign))
    assert isinstance(foreign, RowOptimizerSpec)
    assert all(torch.equal(a, b) for a, b in zip(stepped(table_of("adam"), "operator", "some"), expected, strict=True))


def test_bits_are_those_of_seed_table_step_and_key():
    keys = np.array([5, -3, 2**62])
    base = draws_of(table_of(), keys, 4)
    assert np.array_equal(draws_of(table_of("sgd", "float16"), keys[::-1].copy(), 4)[::-1], base)
    others = [
        draws_of(table_of(seed=1), keys, 4),
        draws_of(replace(table_of(), name="u"), keys, 4),
        draws_of(table_of(), keys, 5),
        draws_of(table_of(), keys + 1, 4),
    ]
    assert len({int(n) for found in [base, *others] for n in found}) == 15


def test_updates_too_small_for_the_last_place_move_weights_on_average():
    """Rounded to nearest, none of them would ever move."""
    table = table_of("sgd")
    layout = layout_of(table)
    rows = torch.zeros(400, layout.num_words, dtype=torch.int32)
    layout.view(rows, "weight").fill_(1.0)
    for step in range(1, 51):  # each is a sixteenth of the distance from 1 to the next number below
        draws = torch.from_numpy(draws_of(table, np.arange(400), step))
        gradient = torch.full((400, DIM), 2.0**-12)
        TableOptimizer(table, layout).update_on_host(rows, gradient, RowStep(step, 1.0, table.optimizer, draws))
    moved = 1 - layout.view(rows, "weight").double().mean()
    assert abs(float(moved) - 50 * 2.0**-12) < 3e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_models_see_float32_and_what_crosses_has_16_bits(dtype):
    engine = EmbeddingEngine([table_of("rowwise_adagrad", dtype)], Topology.single())
    routed = engine.route({"t": np.array([1, 2, 7])})
    working = engine.fetch(routed, step=1)
    vectors = engine.exchange_vectors(routed, working)["t"]
    assert vectors.dtype == engine.tables["t"].weight_dtype
    assert engine.statistics.vector_bytes == 3 * 4 * ((DIM + 1) // 2), "rows cross as whole words"
    engine.accumulate(routed, working, {"t": torch.ones(3, DIM)})
    before = working.tables["t"].layout.columns_of(working.tables["t"].fetched.rows)["weight"]
    engine.update(working, learning_rate=0.01)
    engine.write_back(working)
    read = engine.lookup_readonly({"t": np.array([1, 2, 7])})["t"]
    assert read.dtype == torch.float32
    draws = torch.from_numpy(draws_of(engine.tables["t"], np.array([1, 2, 7]), 1))
    expected = rounded(before.float() - torch.tensor(0.01) * (1.0 / (1.0 + torch.tensor(1e-6))), draws, before.dtype)
    assert torch.equal(read, expected.float())


def test_combinations_that_would_not_be_exact_are_refused():
    half = {"features": ("a", "b"), "half_features": ("b",)}
    with pytest.raises(UserError, match="cross in 16 bits as they are"):
        EmbeddingEngine([table_of(**half)], Topology.single())
    with pytest.raises(UserError, match="mean of 16-bit copies"):
        check_tables_can_differ([table_of()])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_row_is_as_wide_as_its_types_say(optimizer, dtype):
    half, full = layout_of(table_of(optimizer, dtype)), layout_of(table_of(optimizer, "float32"))
    assert full.row_bytes - half.row_bytes in (8, 16)
    assert {column.dtype for column in half.columns[1:]} <= {torch.float32}
