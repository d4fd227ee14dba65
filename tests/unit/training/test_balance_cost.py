"""What a sample costs: by the operations of the model where nothing is given, by measured times where it is fitted."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nestrec.balance import TOKENS, BalanceConfig, CostModel
from nestrec.base.errors import UserError
from nestrec.data.batch_loader import Batch
from nestrec.data.batch_order import BatchPosition
from nestrec.distributed import Topology
from nestrec.tasks.retrieval_task import RetrievalTask
from nestrec.trace import Span, Tracer
from nestrec.training.balance_controller import BalanceController, settled
from nestrec.training.trainer import Trainer
from support.tiny_runs import config_of, make_datasets

TRUTH = CostModel(token=3e-3, token_squared=2e-5, step=0.01)


@pytest.mark.parametrize("family", ["hstu", "ranking", "rows"])
def test_samples_are_dealt_by_the_operations_of_the_model_unless_a_cost_is_given(tmp_path, family):
    make_datasets(tmp_path)
    trainer = Trainer(config_of(family, tmp_path, {"balance.policy": "refined"}), tmp_path / "run", Topology.single())
    told = trainer.session.task.cost()
    assert told is not None
    cost = trainer.balancing._costs.newest
    for length in (1, 7, 300):  # the operations of a pass over one sequence, up to the pair of a token with itself
        exact = told.flops.of(np.array([length]))
        pairs = told.flops.pair + told.flops.channel_pair
        assert cost.of(np.array([length]))[0] == pytest.approx(exact - 0.5 * pairs * length)
    assert (cost.token_squared == 0) == (family == "rows")
    given = config_of(family, tmp_path, {"balance.policy": "refined", "balance.cost.token_squared": 0.5})
    assert given.balance.cost == CostModel(token=1.0, token_squared=0.5)
    assert settled(given.balance, trainer.session.task).cost == given.balance.cost


def refuses(task: RetrievalTask) -> None:
    """As where a backbone does not tell."""
    raise UserError("its operations are not known", option="backbone", value="mine", remedy="let it answer")


@pytest.mark.parametrize("cost", [lambda task: None, refuses], ids=["none", "a backbone that does not tell"])
def test_a_task_that_does_not_tell_its_operations_is_dealt_by_tokens(tmp_path, monkeypatch, cost):
    make_datasets(tmp_path)
    monkeypatch.setattr(RetrievalTask, "cost", cost)
    trainer = Trainer(config_of("hstu", tmp_path, {"balance.policy": "refined"}), tmp_path / "run", Topology.single())
    assert trainer.balancing._costs.newest == TOKENS
    assert settled(BalanceConfig(policy="refined"), trainer.session.task).cost == TOKENS


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_costs_are_fitted_to_the_times_of_spans_whatever_the_device(device):
    """On a GPU spans have the times of events in its streams; here they are made up, so that the truth is known."""
    topology = replace(Topology.single(), device=torch.device(device))
    wrong = CostModel(token=1e-9, token_squared=1.0)
    cfg = BalanceConfig(policy="refined", cost=wrong, fit_every_steps=40)
    balancing = BalanceController(cfg, made_ahead=1, topology=topology, tracer=Tracer())
    balancing.start()
    draw = np.random.default_rng(0)
    for last in (20, 40, 60):
        spans = []
        for step in range(last - 19, last + 1):
            tokens = draw.integers(5, 200, draw.integers(2, 20))
            end_ns = round((TRUTH.step + TRUTH.of(tokens).sum()) * 1e9)
            common = {"id": step, "lane": "compute", "start_ns": 0, "end_ns": end_ns, "step": step}
            spans += [
                Span(name="train.step", kind="step", **common),
                Span(name="train.compute", kind="compute", **common),
            ]
            balancing.watch(Batch(BatchPosition(0, step), 1.0, np.arange(len(tokens)), (), tokens=tokens))
        assert balancing.report(spans, last) == {}, "one rank has nobody to wait for"
        change = balancing.decide(last, BatchPosition(0, last + 1), lambda at: replace(at, step=at.step + 1))
        assert (change is not None) == (last == 40)
        if change is not None:
            assert change.cost.token == pytest.approx(TRUTH.token, rel=1e-3)
            assert change.cost.token_squared == pytest.approx(TRUTH.token_squared, rel=1e-3)
