"""Operators under the name `nestrec::...`, so that torch.compile and fake tensors know their shapes; where Triton runs.

`torch.library.custom_op` would do the same, at 20 microseconds a call instead of 3.
"""

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton kernels run on a CPU, element by element: for tests."""
HAS_TRITON = importlib.util.find_spec("triton") is not None and (torch.version.cuda is not None or IS_INTERPRETED)
"""Kernels are defined, and triton imported, only where this holds."""

_LIBRARY = torch.library.Library("nestrec", "FRAGMENT")


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether kernels can take this tensor."""
    return HAS_TRITON and (tensor.is_cuda or IS_INTERPRETED)


def define_op(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The operator `nestrec::schema` for every device: `run` computes, `fake` makes outputs of the right shapes."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nestrec::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.nestrec, name)
