"""The dense update: gradient clipping, learning rate schedules, weight decay and EMA weights."""

import math

import pytest
import torch
from torch import nn

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.pipeline.dense.dense_optimizer import AdamW, DenseOptimizer, OptimizerConfig

CPU = torch.device("cpu")


def train_small_model(
    cfg: OptimizerConfig, num_steps: int = 5, scale: float = 1.0
) -> tuple[nn.Module, DenseOptimizer, list[float]]:
    """Return a small model after some steps with random gradients, its optimizer and the gradient norms."""
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


def test_gradient_clipping_scales_only_long_gradients() -> None:
    plain, clipped = (train_small_model(OptimizerConfig(max_grad_norm=clip))[0] for clip in (None, 100.0))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), clipped.parameters(), strict=True))
    # The scale of a gradient affects AdamW only through eps, so eps is large here.
    cfg = OptimizerConfig(learning_rate=0.1, max_grad_norm=0.5, eps=1.0)
    model, _, norms = train_small_model(cfg, 1)
    expected, _, _ = train_small_model(OptimizerConfig(learning_rate=0.1, eps=1.0), 1, scale=0.5 / norms[0])
    assert norms[0] > 1, "the reported norm is that before clipping"
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("decay", "half"), [("linear", 0.55), ("cosine", 0.55)])
def test_lr_schedule_warms_up_then_decays_to_final_fraction(decay: str, half: float) -> None:
    cfg = OptimizerConfig(
        learning_rate=2.0,
        table_learning_rate=4.0,
        warmup_steps=4,
        lr_schedule=decay,
        lr_decay_steps=10,
        final_lr_fraction=0.1,
    )
    assert cfg.rates(2).dense == 1.0
    assert cfg.rates(4).dense == 2.0
    assert cfg.rates(9).dense == pytest.approx(2.0 * half)
    assert cfg.rates(9).tables == pytest.approx(4.0 * half)
    assert cfg.rates(14).dense == cfg.rates(1000).dense == pytest.approx(0.2)
    quarter = 0.1 + 0.9 * (0.8 if decay == "linear" else 0.5 * (1 + math.cos(0.2 * math.pi)))
    assert cfg.rates(6).dense == pytest.approx(2.0 * quarter)


@pytest.mark.parametrize("options", [{"lr_schedule": "cosine"}, {"lr_decay_steps": 10}])
def test_lr_schedule_and_decay_steps_require_each_other(options: dict[str, object]) -> None:
    with pytest.raises(UserError, match="must be set together"):
        OptimizerConfig(**options)  # type: ignore[arg-type]


def test_weight_decay_on_matrices_excludes_biases() -> None:
    torch.manual_seed(0)
    cfg = OptimizerConfig(learning_rate=0.01, weight_decay=0.3, weight_decay_on="matrices")
    weights = {"matrix": nn.Parameter(torch.randn(5, 3)), "bias": nn.Parameter(torch.randn(7))}
    expected = {name: nn.Parameter(weight.detach().clone()) for name, weight in weights.items()}
    groups = [
        {"params": [expected["matrix"]], "weight_decay": 0.3},
        {"params": [expected["bias"]], "weight_decay": 0.0},
    ]
    torchs = torch.optim.AdamW(groups, lr=0.01, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, foreach=True)
    ours = AdamW(weights, cfg, CPU)
    for _ in range(6):
        for name, weight in weights.items():
            weight.grad = torch.randn_like(weight)
            expected[name].grad = weight.grad.clone()
        ours.step(0.01)
        torchs.step()
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


def test_ema_weights_are_averaged_swapped_and_restored() -> None:
    model, dense, _ = train_small_model(OptimizerConfig(learning_rate=0.1, ema_decay=0.75), 6)
    torch.manual_seed(3)
    mean = nn.Linear(4, 3).weight.detach().clone()
    for steps in range(1, 7):
        mean.lerp_(train_small_model(OptimizerConfig(learning_rate=0.1), steps)[0].weight.detach(), 0.25)
    last = model.weight.detach().clone()
    with dense.averaged():
        assert torch.equal(model.weight, mean)
    assert torch.equal(model.weight, last)
    saved = {name: tensor.clone() for name, tensor in dense.tensors().items()}
    other, again, _ = train_small_model(OptimizerConfig(learning_rate=0.1, ema_decay=0.75), 2)
    again.load(saved)
    with again.averaged():
        assert torch.equal(other.weight, mean)
    new_model, fresh, _ = train_small_model(OptimizerConfig(ema_decay=0.75), 2)
    fresh.load({name: tensor for name, tensor in saved.items() if not name.startswith("mean/")})
    with fresh.averaged():
        assert torch.equal(new_model.weight, last), "without saved averages, the averages start from the weights"
