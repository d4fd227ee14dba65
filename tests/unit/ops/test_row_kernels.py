"""Kernels on rows without a GPU: the fallbacks here, the kernels themselves under Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nestrec.ops.move_rows import move_rows

WARNS = "ignore:Conversion of an array with ndim:DeprecationWarning"
"""By the interpreter, of its own use of numpy."""
TESTS = Path(__file__).resolve().parents[2] / "gpu" / "test_row_kernels_gpu.py"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_pass_the_tests_of_the_gpu_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-W", WARNS, str(TESTS)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def test_rows_without_a_place_are_not_moved():
    target = torch.zeros(3, 2, dtype=torch.int32)
    source = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    move_rows(source, target, torch.tensor([1, -1, 0]), torch.tensor([2, 0, -1]))
    assert target.tolist() == [[0, 0], [0, 0], [3, 4]]


def test_the_operators_are_known_to_the_compiler():
    with torch._subclasses.FakeTensorMode():
        rows = torch.empty(4, 8, dtype=torch.int32)
        assert torch.ops.nestrec.move_rows(rows, torch.empty_like(rows), None, None) is None
