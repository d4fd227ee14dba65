"""Where Triton runs."""

import importlib.util
import os

import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton kernels run on a CPU, element by element: for tests."""
HAS_TRITON = importlib.util.find_spec("triton") is not None and (torch.version.cuda is not None or IS_INTERPRETED)
"""Kernels are defined, and triton imported, only where this holds."""


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether kernels can take this tensor."""
    return HAS_TRITON and (tensor.is_cuda or IS_INTERPRETED)
