"""Kernels of the losses without a GPU: their operators here, the kernels themselves under Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nestrec.ops.sampled_losses
import nestrec.ops.tiled_cross_entropy  # noqa: F401 - registers its operators

WARNS = ["ignore:overflow encountered:RuntimeWarning", "ignore:Conversion of an array with ndim:DeprecationWarning",
         "ignore:divide by zero:RuntimeWarning", "ignore:invalid value:RuntimeWarning"]  # fmt: skip
"""By the interpreter: exponentials of masked logits, and its own use of numpy."""


@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_pass_the_tests_of_the_losses_under_the_interpreter():
    tests = [str(Path(__file__).with_name(name)) for name in ("test_sampled_losses.py", "test_tiled_cross_entropy.py")]
    chosen = ["-k", "(fused and (shape0 or shape2 or shape3)) or tile1-shape2", *tests]  # the small ones: it is slow
    warns = [word for warning in WARNS for word in ("-W", warning)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *warns, *chosen]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_operators_are_known_to_the_compiler():
    with torch._subclasses.FakeTensorMode():
        query, rows = torch.empty(5, 8, dtype=torch.bfloat16), torch.empty(20, 8, dtype=torch.bfloat16)
        index = torch.empty(5, 4, dtype=torch.int32)
        loss, total = torch.ops.nestrec.sampled_loss(query, rows, index, None, "bce")
        assert loss.shape == total.shape == (5,)
        assert loss.dtype == torch.float32
        grad, slope = torch.ops.nestrec.sampled_loss_backward(query, rows, index, None, total, loss, "bce")
        assert (grad.shape, slope.shape) == ((5, 8), (5, 4))
        assert torch.ops.nestrec.sum_outer(slope, query, index, 20).shape == (20, 8)
        assert torch.ops.nestrec.cross_entropy_slopes(slope, index[:, 0], total, loss) is None
        assert torch.ops.nestrec.cross_entropy_tile(slope, index[:, 0], total, loss, loss.clone()) is None
