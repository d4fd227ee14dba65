"""What a run chose from measurements binds it while the choice is open; what the user names when it goes on counts."""

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
AUTO = {"batch.micro_batches": "auto", "pipeline.replay": json.dumps(to_plain((*CHOSEN, LATER)))}


def trained(data: Path, run: Path, steps: int, more: Mapping[str, object]) -> Trainer:
    given = {"training.max_steps": steps, "training.evaluate_every_epochs": 0, **more}
    trainer = Trainer(config_of("rows", data, given), run, Topology.single())
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("given", "parts", "known"),
    [
        ({"batch.micro_batches": 3}, 3, ()),
        ({"batch.micro_batches": "auto"}, 5, CHOSEN),
        ({"batch.micro_batches": "auto", "pipeline.replay": json.dumps(to_plain((LATER,)))}, 2, (LATER,)),
    ],
    ids=["a number", "still open", "another replay"],
)
def test_a_resumed_run_is_cut_as_its_user_says_now(tiny_data, tmp_path, given, parts, known):
    first = trained(tiny_data, tmp_path, 2, AUTO)
    assert first.window.schedule.at(first.state.position) == 5
    resumed = trained(tiny_data, tmp_path, 4, given)
    assert resumed.window.schedule.at(resumed.state.position) == parts
    assert resumed.state.window_changes == known
    steps = [span.micro_batch for span in resumed.tracer.spans() if span.name == "train.compute"]
    assert set(steps) == set(range(parts))


def balancing(**given: object) -> BalanceController:
    cfg = BalanceConfig(policy="greedy", **given)
    return BalanceController(cfg, made_ahead=1, topology=Topology.single(), tracer=Tracer())


@pytest.mark.parametrize(
    ("given", "known"),
    [
        ({"fit_every_steps": 20}, FITTED),
        ({"cost": CostModel(token=7.0)}, ()),
        ({"fit_every_steps": 20, "cost": CostModel(token=7.0)}, ()),
        ({"replay": (CostChange(step=1, first=BatchPosition(0, 1), cost=CostModel(token=9.0)),)}, 9.0),
    ],
    ids=["still fitting", "no fitting", "another cost", "a replay"],
)
def test_a_resumed_run_is_dealt_as_its_user_says_now(given, known):
    resumed = balancing(**given)
    found, notes = resumed.resume(FITTED, 20, fitted_from=CostModel())
    assert notes == []
    assert found == known if known != 9.0 else [change.cost.token for change in found] == [9.0]


def test_a_resumed_run_fits_when_it_would_have_done_and_not_at_its_first_report():
    resumed = balancing(fit_every_steps=100)
    resumed.resume((), 110)
    resumed._measured = [Measurement(1e-3 + 1e-6 * n * n, n, n * n) for n in range(1, 400)]
    assert resumed.decide(120, BatchPosition(1, 0), lambda position: position) is None, "a fit was due at step 100"
    assert resumed.decide(200, BatchPosition(2, 0), lambda position: position) is not None


def test_a_checkpoint_knows_the_cost_that_its_fits_began_with(tiny_data, tmp_path):
    trained(tiny_data, tmp_path, 2, {"balance.cost.token": 2.0})
    resumed = Trainer(config_of("rows", tiny_data, {}), tmp_path, Topology.single())
    state = resumed.saving.find_last()
    assert state is not None
    assert state.cost == CostModel(token=2.0)
