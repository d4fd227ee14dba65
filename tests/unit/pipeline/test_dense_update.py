"""The dense side of an update: clipping, decay of rates and of weights, running means."""

import math

import pytest
import torch
from torch import nn

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.pipeline.dense.dense_optimizer import AdamW, DenseOptimizer, OptimizerConfig

CPU = torch.device("cpu")


def updated(
    cfg: OptimizerConfig, num_steps: int = 5, scale: float = 1.0
) -> tuple[nn.Module, DenseOptimizer, list[float]]:
    """A small model after some steps of made-up gradients, and their norms."""
    torch.manual_seed(3)
    model = nn.Linear(4, 3)
    dense = DenseOptimizer(model, cfg, Topology.single(), CPU)
    norms = []
    for step in range(num_steps):
        draw = torch.Generator().manual_seed(step)
        for weight in model.parameters():
            weight.grad = scale * torch.randn(weight.shape, generator=draw)
        totals = dense.apply(dense.reduce(torch.zeros(()), False), cfg.rates(step + 1).dense)
        norms.append(float(totals.gradient_norm))
    return model, dense, norms


def test_a_long_gradient_is_scaled_to_the_norm_and_a_short_one_stays_to_the_bit() -> None:
    plain, clipped = (updated(OptimizerConfig(clip_norm=clip))[0] for clip in (None, 100.0))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), clipped.parameters(), strict=True))
    # AdamW does not see the scale of a gradient but through eps, so that is made large.
    cfg = OptimizerConfig(learning_rate=0.1, clip_norm=0.5, eps=1.0)
    model, _, norms = updated(cfg, 1)
    by_hand, _, _ = updated(OptimizerConfig(learning_rate=0.1, eps=1.0), 1, scale=0.5 / norms[0])
    assert norms[0] > 1, "told as it was"
    for a, b in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("decay", "half"), [("linear", 0.55), ("cosine", 0.55)])
def test_rates_grow_then_fall_to_what_is_left(decay: str, half: float) -> None:
    cfg = OptimizerConfig(
        learning_rate=2.0, table_learning_rate=4.0, warmup_steps=4, decay=decay, decay_steps=10, final_rate=0.1
    )
    assert cfg.rates(2).dense == 1.0
    assert cfg.rates(4).dense == 2.0
    assert cfg.rates(9).dense == pytest.approx(2.0 * half)
    assert cfg.rates(9).tables == pytest.approx(4.0 * half)
    assert cfg.rates(14).dense == cfg.rates(1000).dense == pytest.approx(0.2)
    quarter = 0.1 + 0.9 * (0.8 if decay == "linear" else 0.5 * (1 + math.cos(0.2 * math.pi)))
    assert cfg.rates(6).dense == pytest.approx(2.0 * quarter)


@pytest.mark.parametrize("given", [{"decay": "cosine"}, {"decay_steps": 10}])
def test_a_decay_without_steps_is_refused_and_steps_without_a_decay(given: dict[str, object]) -> None:
    with pytest.raises(UserError, match="goes with decay_steps"):
        OptimizerConfig(**given)  # type: ignore[arg-type]


def test_only_matrices_decay_where_that_is_asked_for() -> None:
    torch.manual_seed(0)
    cfg = OptimizerConfig(learning_rate=0.01, weight_decay=0.3, weight_decay_of="matrices")
    mine = {"matrix": nn.Parameter(torch.randn(5, 3)), "bias": nn.Parameter(torch.randn(7))}
    theirs = {name: nn.Parameter(weight.detach().clone()) for name, weight in mine.items()}
    groups = [
        {"params": [theirs["matrix"]], "weight_decay": 0.3},
        {"params": [theirs["bias"]], "weight_decay": 0.0},
    ]
    torchs = torch.optim.AdamW(groups, lr=0.01, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, foreach=True)
    ours = AdamW(mine, cfg, CPU)
    for _ in range(6):
        for name, weight in mine.items():
            weight.grad = torch.randn_like(weight)
            theirs[name].grad = weight.grad.clone()
        ours.step(0.01)
        torchs.step()
    assert all(torch.equal(weight, theirs[name]) for name, weight in mine.items())


def test_running_means_are_kept_used_and_given_back() -> None:
    model, dense, _ = updated(OptimizerConfig(learning_rate=0.1, ema=0.75), 6)
    torch.manual_seed(3)
    mean = nn.Linear(4, 3).weight.detach().clone()
    for steps in range(1, 7):
        mean.lerp_(updated(OptimizerConfig(learning_rate=0.1), steps)[0].weight.detach(), 0.25)
    last = model.weight.detach().clone()
    with dense.averaged():
        assert torch.equal(model.weight, mean)
    assert torch.equal(model.weight, last)
    saved = {name: tensor.clone() for name, tensor in dense.tensors().items()}
    other, again, _ = updated(OptimizerConfig(learning_rate=0.1, ema=0.75), 2)
    again.load(saved)
    with again.averaged():
        assert torch.equal(other.weight, mean)
    begun, fresh, _ = updated(OptimizerConfig(ema=0.75), 2)
    fresh.load({name: tensor for name, tensor in saved.items() if not name.startswith("mean/")})
    with fresh.averaged():
        assert torch.equal(begun.weight, last), "of a run that kept none, they begin with its weights"
