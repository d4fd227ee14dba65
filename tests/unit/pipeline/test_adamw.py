"""AdamW is bitwise identical to `torch.optim.AdamW`, and does not import the compiler or Triton."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from nestrec.pipeline.dense.dense_optimizer import AdamW, OptimizerConfig


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_is_bitwise_identical_to_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    cfg = OptimizerConfig(learning_rate=0.01, weight_decay=0.1, beta1=0.8, beta2=0.95, eps=1e-6)
    weights = {name: nn.Parameter(torch.randn(shape, dtype=dtype)) for name, shape in {"a": (5, 3), "b": (7,)}.items()}
    expected = {name: nn.Parameter(weight.detach().clone()) for name, weight in weights.items()}
    ours = AdamW(weights, cfg, torch.device("cpu"))
    torchs = torch.optim.AdamW(expected.values(), lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, foreach=True)
    for step in range(12):
        rate = 0.01 / (step + 1)
        torchs.param_groups[0]["lr"] = rate
        for name, weight in weights.items():
            if name == "b" and step % 3 == 0:  # without a gradient, neither weight nor step count changes
                weight.grad = expected[name].grad = None
                continue
            weight.grad = torch.randn_like(weight)
            expected[name].grad = weight.grad.clone()
        ours.step(rate)
        torchs.step()
        if step == 6:  # simulates a restart
            saved = {name: {part: value.clone() for part, value in state.items()} for name, state in ours.state.items()}
            ours = AdamW(weights, cfg, torch.device("cpu"))
            ours.load(saved)
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name])
        for part, value in torchs.state[expected[name]].items():
            assert torch.equal(ours.state[name][part], value), part
            assert ours.state[name][part].dtype == value.dtype


@pytest.mark.skipif(torch.version.cuda is not None, reason="CUDA builds of PyTorch import Triton")
def test_cpu_training_imports_no_compiler_or_triton() -> None:
    code = """
import sys, torch
from torch import nn
from nestrec.pipeline.dense.dense_optimizer import AdamW
from nestrec.pipeline.dense.dense_optimizer import OptimizerConfig
from nestrec.training.trainer import Trainer
weight = nn.Parameter(torch.ones(3))
optimizer = AdamW({"w": weight}, OptimizerConfig(), torch.device("cpu"))
weight.square().sum().backward()
optimizer.step(0.1)
print([name for name in ("torch._dynamo", "triton") if name in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
