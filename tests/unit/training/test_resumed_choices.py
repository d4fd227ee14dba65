"""Choices from measurements are kept on resume while the option is automatic; explicit options override them."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from nestrec.balance import BalanceConfig
from nestrec.balance.cost import CostChange, CostModel, Measurement
from nestrec.base.config import to_plain
from nestrec.data.batch_order import BatchPosition
from nestrec.distributed import Topology
from nestrec.pipeline.window_cost_model import MicroBatchChange
from nestrec.trace import Tracer
from nestrec.training.balance_controller import BalanceController
from nestrec.training.trainer import Trainer
from support.tiny_runs import config_of

CHOSEN = (MicroBatchChange(step=1, first=BatchPosition(0, 1), micro_batches=5),)
LATER = MicroBatchChange(step=100, first=BatchPosition(9, 0), micro_batches=7)
FITTED = (CostChange(step=20, first=BatchPosition(1, 0), cost=CostModel(token=3.0)),)
AUTO = {"batch.num_micro_batches": "auto", "pipeline.replay_changes": json.dumps(to_plain((*CHOSEN, LATER)))}


def train_steps(data: Path, run: Path, steps: int, options: Mapping[str, object]) -> Trainer:
    overrides = {"training.max_steps": steps, "training.eval_every_epochs": 0, **options}
    trainer = Trainer(config_of("rows", data, overrides), run, Topology.single())
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("overrides", "parts", "expected"),
    [
        ({"batch.num_micro_batches": 3}, 3, ()),
        ({"batch.num_micro_batches": "auto"}, 5, CHOSEN),
        ({"batch.num_micro_batches": "auto", "pipeline.replay_changes": json.dumps(to_plain((LATER,)))}, 2, (LATER,)),
    ],
    ids=["a number", "still open", "another replay"],
)
def test_resume_uses_micro_batches_of_current_options(tiny_data, tmp_path, overrides, parts, expected):
    first = train_steps(tiny_data, tmp_path, 2, AUTO)
    assert first.micro_batch_tuner.schedule.at(first.state.position) == 5
    resumed = train_steps(tiny_data, tmp_path, 4, overrides)
    assert resumed.micro_batch_tuner.schedule.at(resumed.state.position) == parts
    assert resumed.state.window_changes == expected
    steps = [span.micro_batch for span in resumed.tracer.spans() if span.name == "train.forward_backward"]
    assert set(steps) == set(range(parts))


def make_controller(**options: object) -> BalanceController:
    cfg = BalanceConfig(policy="greedy", **options)
    return BalanceController(cfg, num_prefetched=1, topology=Topology.single(), tracer=Tracer())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"fit_every_steps": 20}, FITTED),
        ({"cost": CostModel(token=7.0)}, ()),
        ({"fit_every_steps": 20, "cost": CostModel(token=7.0)}, ()),
        ({"replay_changes": (CostChange(step=1, first=BatchPosition(0, 1), cost=CostModel(token=9.0)),)}, 9.0),
    ],
    ids=["still fitting", "no fitting", "another cost", "a replay"],
)
def test_resume_uses_balance_cost_of_current_options(options, expected):
    resumed = make_controller(**options)
    changes, notes = resumed.resume(FITTED, 20, fitted_from=CostModel())
    assert notes == []
    assert changes == expected if expected != 9.0 else [change.cost.token for change in changes] == [9.0]


def test_resume_fits_balance_cost_at_the_scheduled_step():
    resumed = make_controller(fit_every_steps=100)
    resumed.resume((), 110)
    resumed._measured = [Measurement(1e-3 + 1e-6 * n * n, n, n * n) for n in range(1, 400)]
    assert resumed.decide(120, BatchPosition(1, 0), lambda position: position) is None, (
        "the scheduled fit of step 100 is not repeated"
    )
    assert resumed.decide(200, BatchPosition(2, 0), lambda position: position) is not None


def test_checkpoint_stores_the_initial_balance_cost(tiny_data, tmp_path):
    train_steps(tiny_data, tmp_path, 2, {"balance.cost.token": 2.0})
    resumed = Trainer(config_of("rows", tiny_data, {}), tmp_path, Topology.single())
    state = resumed.checkpointer.restore_last_if_any()
    assert state is not None
    assert state.cost == CostModel(token=2.0)
