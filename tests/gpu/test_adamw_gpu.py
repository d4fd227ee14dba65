"""The fused AdamW kernel is bitwise identical to that of PyTorch."""

import pytest
import torch
from torch import nn

from nestrec.pipeline.dense.dense_optimizer import AdamW, OptimizerConfig

pytestmark = pytest.mark.gpu


def test_fused_adamw_is_bitwise_identical_to_torch() -> None:
    torch.manual_seed(0)
    mine = {name: nn.Parameter(torch.randn(1000, 30, device="cuda")) for name in ("a", "b")}
    theirs = {name: nn.Parameter(weight.detach().clone()) for name, weight in mine.items()}
    ours = AdamW(mine, OptimizerConfig(weight_decay=0.1), torch.device("cuda"))
    torchs = torch.optim.AdamW(theirs.values(), lr=1e-3, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1, fused=True)
    for _ in range(10):
        for name, weight in mine.items():
            weight.grad = torch.randn_like(weight)
            theirs[name].grad = weight.grad.clone()
        ours.step(1e-3)
        torchs.step()
    for name, weight in mine.items():
        assert torch.equal(weight, theirs[name])
        assert all(torch.equal(ours.state[name][part], value) for part, value in torchs.state[theirs[name]].items())
