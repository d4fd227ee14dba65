"""Row optimizer plugins: a formula is sufficient; names and options are checked."""

from dataclasses import replace
from importlib.metadata import EntryPoint

import numpy as np
import pytest
import torch

from nestrec.base.config_values import from_plain
from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine, RowOptimizerConfig, StoreConfig, TableConfig
from nestrec.embedding.row_optimizer import ROW_OPTIMIZERS, RowOptimizerSpec, StateColumn


def _momentum(states, grad, step):
    states[0].mul_(step.option("momentum")).add_(grad)
    return step.learning_rate * states[0]


MOMENTUM = RowOptimizerSpec(
    state=(StateColumn("state_momentum", is_row_wise=False),), formula=_momentum, options={"momentum": 0.5}
)


@pytest.fixture
def with_momentum(monkeypatch):
    point = EntryPoint("momentum", f"{__name__}:MOMENTUM", ROW_OPTIMIZERS.group)
    monkeypatch.setitem(ROW_OPTIMIZERS._external, "momentum", point)
    monkeypatch.setitem(ROW_OPTIMIZERS._loaded, "momentum", MOMENTUM)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_row_optimizer_plugin_trains_by_formula(with_momentum, dtype):
    # The table has at most two rows, so that updates of the third key are dropped.
    table = TableConfig(
        name="t",
        dim=3,
        dtype=dtype,
        store=StoreConfig(max_rows=2),
        optimizer=RowOptimizerConfig(kind="momentum", options={"momentum": 0.25}),
    )
    engine = EmbeddingEngine([table], Topology.single())
    keys = torch.tensor([5, 7, 9])
    start = engine.lookup_readonly({"t": keys})["t"].double()
    gradient = torch.tensor([[1.0, 2.0, 4.0]]).repeat(3, 1)
    for step in (1, 2):
        routed = engine.route({"t": keys})
        working = engine.fetch_rows(routed, step=step)
        engine.exchange_vectors(routed, working)
        engine.accumulate(routed, working, {"t": gradient.clone()})
        engine.update(working, learning_rate=0.5)
        engine.write_back(working)
    moved = start - engine.lookup_readonly({"t": keys})["t"].double()
    expected = 0.5 * gradient * torch.tensor([[1 + 1.25], [1 + 1.25], [0.0]])
    torch.testing.assert_close(moved, expected.double(), rtol=0, atol=2e-2 if dtype == "bfloat16" else 1e-6)


def test_row_optimizer_unknown_name_suggests_nearest(with_momentum):
    with pytest.raises(UserError, match=r"optimizer\.kind=momentun: .*Did you mean 'momentum'"):
        from_plain(TableConfig, {"name": "t", "dim": 2, "optimizer": {"kind": "momentun"}})


def test_row_optimizer_options_are_checked(with_momentum):
    with pytest.raises(UserError, match="Did you mean 'momentum'"):
        RowOptimizerConfig(kind="momentum", options={"momentom": 0.1})
    with pytest.raises(UserError, match="has no options of its own"):
        RowOptimizerConfig(kind="adam", options={"momentum": 0.1})


def _momentum_loop(rows, grad, columns, step):
    states = rows[:, columns[0] :]
    states[:] = states * np.float32(step.option("momentum")) + grad
    rows[:, : columns[0]] -= np.float32(step.learning_rate) * states


def _loop_without_momentum(rows, grad, columns, step):
    rows[:, : columns[0]] -= np.float32(step.learning_rate) * grad


def _kernel_with_wrong_sign(weight, states, grad, rows, step):
    weight += _momentum(states, grad, step)


def _engine(monkeypatch, **changes):
    optimizer = replace(MOMENTUM, **changes)
    point = EntryPoint("momentum", f"{__name__}:MOMENTUM", ROW_OPTIMIZERS.group)
    monkeypatch.setitem(ROW_OPTIMIZERS._external, "momentum", point)
    monkeypatch.setitem(ROW_OPTIMIZERS._loaded, "momentum", optimizer)
    return EmbeddingEngine(
        [TableConfig(name="t", dim=3, optimizer=RowOptimizerConfig(kind="momentum"))], Topology.single()
    )


def test_row_optimizer_plugin_host_loop_is_accepted(monkeypatch):
    _engine(monkeypatch, host_loop=_momentum_loop).close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"host_loop": _loop_without_momentum},
            r"momentum=host_loop: .* differs from the formula: after two steps, the weigh",
        ),
        ({"kernel": _kernel_with_wrong_sign}, "momentum=kernel: .* differs from the formula"),
        (
            {"formula": lambda states, grad, step: None},
            r"formula: its `formula` returns None instead of the values to subtract",
        ),
        ({"formula": lambda states, grad, step: grad.sum(1)}, r"returns torch.float32 of \(3,\) instead of"),
        ({"formula": lambda states, grad, step: grad - grad.mean(0)}, "updates a row differently if other rows are"),
        (
            {"formula": lambda states, grad, step: step.option("mu") * grad},
            "reads the option 'mu', which its spec does not declare",
        ),
        ({"state": (StateColumn("m", is_row_wise=False),)}, "state: .* names must start with 'state_'"),
        (
            {"state": (replace(MOMENTUM.state[0], initial=lambda options: "0"),)},
            "initializes 'state_momentum' with '0'",
        ),
    ],
)
def test_row_optimizer_plugin_mismatch_is_named(monkeypatch, changes, message):
    with pytest.raises(UserError, match=message) as raised:
        _engine(monkeypatch, **changes)
    assert "nestrec.row_optimizers" in str(raised.value) or raised.value.value == "momentum"
