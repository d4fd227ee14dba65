"""Balance cost of samples: the model's FLOPs by default, or a cost model fitted to measured times."""

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
from nestrec.training.balance_controller import BalanceController, resolve_balance_config
from nestrec.training.trainer import Trainer
from support.tiny_runs import config_of, make_datasets

TRUTH = CostModel(token=3e-3, token_squared=2e-5, step=0.01)


@pytest.mark.parametrize("family", ["hstu", "ranking", "rows"])
def test_balance_cost_defaults_to_the_flops_of_the_model(tmp_path, family):
    make_datasets(tmp_path)
    trainer = Trainer(config_of(family, tmp_path, {"balance.policy": "refined"}), tmp_path / "run", Topology.single())
    task_cost = trainer.session.task.cost()
    assert task_cost is not None
    cost = trainer.balance_controller._costs.newest
    for length in (1, 7, 300):  # the FLOPs of one sequence, except for the pair of a token with itself
        exact = task_cost.flops.total(np.array([length]))
        pairs = task_cost.flops.pair + task_cost.flops.channel_pair
        assert cost.sample_costs(np.array([length]))[0] == pytest.approx(exact - 0.5 * pairs * length)
    assert (cost.token_squared == 0) == (family == "rows")
    cfg = config_of(family, tmp_path, {"balance.policy": "refined", "balance.cost.token_squared": 0.5})
    assert cfg.balance.cost == CostModel(token=1.0, token_squared=0.5)
    assert resolve_balance_config(cfg.balance, trainer.session.task).cost == cfg.balance.cost


def raise_unknown_cost(task: RetrievalTask) -> None:
    """Fails like the cost of a backbone that does not report its FLOPs."""
    raise UserError("its FLOPs are not known", option="backbone", value="mine", remedy="implement flops()")


@pytest.mark.parametrize("cost", [lambda task: None, raise_unknown_cost], ids=["none", "unknown"])
def test_balance_cost_without_task_cost_counts_tokens(tmp_path, monkeypatch, cost):
    make_datasets(tmp_path)
    monkeypatch.setattr(RetrievalTask, "cost", cost)
    trainer = Trainer(config_of("hstu", tmp_path, {"balance.policy": "refined"}), tmp_path / "run", Topology.single())
    assert trainer.balance_controller._costs.newest == TOKENS
    assert resolve_balance_config(BalanceConfig(policy="refined"), trainer.session.task).cost == TOKENS


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_balance_cost_is_fitted_to_span_times(device):
    """Spans on a GPU have the times of CUDA events; here they are synthetic, so the true cost is known."""
    topology = replace(Topology.single(), device=torch.device(device))
    wrong = CostModel(token=1e-9, token_squared=1.0)
    cfg = BalanceConfig(policy="refined", cost=wrong, fit_every_steps=40)
    controller = BalanceController(cfg, num_prefetched=1, topology=topology, tracer=Tracer())
    controller.start()
    draw = np.random.default_rng(0)
    for last in (20, 40, 60):
        spans = []
        for step in range(last - 19, last + 1):
            tokens = draw.integers(5, 200, draw.integers(2, 20))
            end_ns = round((TRUTH.step + TRUTH.sample_costs(tokens).sum()) * 1e9)
            common = {"id": step, "lane": "compute", "start_ns": 0, "end_ns": end_ns, "step": step}
            spans += [
                Span(name="train.step", kind="step", **common),
                Span(name="train.forward_backward", kind="compute", **common),
            ]
            controller.record_step(Batch(BatchPosition(0, step), 1.0, np.arange(len(tokens)), (), tokens=tokens))
        assert controller.report(spans, last) == {}, "a single rank never waits for others"
        change = controller.decide(last, BatchPosition(0, last + 1), lambda at: replace(at, step=at.step + 1))
        assert (change is not None) == (last == 40)
        if change is not None:
            assert change.cost.token == pytest.approx(TRUTH.token, rel=1e-3)
            assert change.cost.token_squared == pytest.approx(TRUTH.token_squared, rel=1e-3)
