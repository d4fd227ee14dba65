"""Row optimisers of other packages: a formula is enough, names and options are checked."""

from importlib.metadata import EntryPoint

import pytest
import torch

from nestrec.base.config import from_plain
from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine, RowOptimizerConfig, StoreConfig, TableConfig
from nestrec.embedding.row_optimizer import ROW_OPTIMIZERS, RowOptimizer, StateColumn


def _momentum(states, grad, step):
    states[0].mul_(step.option("momentum")).add_(grad)
    return step.learning_rate * states[0]


MOMENTUM = RowOptimizer(
    state=(StateColumn("state_momentum", is_row_wise=False),), formula=_momentum, options={"momentum": 0.5}
)


@pytest.fixture
def with_momentum(monkeypatch):
    point = EntryPoint("momentum", f"{__name__}:MOMENTUM", ROW_OPTIMIZERS.group)
    monkeypatch.setitem(ROW_OPTIMIZERS._foreign, "momentum", point)
    monkeypatch.setitem(ROW_OPTIMIZERS._loaded, "momentum", MOMENTUM)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_optimiser_of_another_package_trains_by_its_formula_alone(with_momentum, dtype):
    # With a bound of two rows, what the third key learns is dropped.
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
        working = engine.fetch(routed, step=step)
        engine.exchange_vectors(routed, working)
        engine.accumulate(routed, working, {"t": gradient.clone()})
        engine.update(working, learning_rate=0.5)
        engine.write_back(working)
    moved = start - engine.lookup_readonly({"t": keys})["t"].double()
    expected = 0.5 * gradient * torch.tensor([[1 + 1.25], [1 + 1.25], [0.0]])
    torch.testing.assert_close(moved, expected.double(), rtol=0, atol=2e-2 if dtype == "bfloat16" else 1e-6)


def test_an_unknown_optimiser_is_refused_with_the_nearest_name(with_momentum):
    with pytest.raises(UserError, match=r"optimizer\.kind = 'momentun'.*\n.*did you mean 'momentum'"):
        from_plain(TableConfig, {"name": "t", "dim": 2, "optimizer": {"kind": "momentun"}})


def test_options_of_an_optimiser_are_checked_by_name(with_momentum):
    with pytest.raises(UserError, match="did you mean 'momentum'"):
        RowOptimizerConfig(kind="momentum", options={"momentom": 0.1})
    with pytest.raises(UserError, match="has none of its own"):
        RowOptimizerConfig(kind="adam", options={"momentum": 0.1})
