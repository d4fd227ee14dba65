"""Launchers of kernels as operators of torch.

    @kernel_op("name", fake=...)          in torch.compile: the operator nestrec::name, shaped by its fake twin
    def name(...): ...                    in eager mode: the launcher itself, without the dispatcher's cost a call

Measured on an H200, an eager call through the dispatcher cost the host about as much as the launch itself.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from nestrec.ops.registry import runs_triton

Launcher = TypeVar("Launcher", bound=Callable[..., Any])
KERNEL_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def kernel_op(name: str, *, fake: Callable[..., Any], mutates: Sequence[str] = ()) -> Callable[[Launcher], Launcher]:
    """fake: takes the same arguments and returns empty tensors like the launcher's. mutates: arguments written to."""

    def register(launcher: Launcher) -> Launcher:
        operator = torch.library.custom_op(f"nestrec::{name}", launcher, mutates_args=tuple(mutates))
        operator.register_fake(fake)

        def call(*arguments: Any) -> Any:
            return operator(*arguments) if torch.compiler.is_compiling() else launcher(*arguments)

        call.__doc__ = launcher.__doc__
        return call  # type: ignore[return-value]

    return register


def runs_kernels(x: torch.Tensor) -> bool:
    """Whether `x` is computed on by kernels: on a GPU, or anywhere under Triton's interpreter."""
    return runs_triton(x) and x.dtype in KERNEL_TYPES


def compute_type(x: torch.Tensor) -> torch.dtype:
    """The type of products: autocast's where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
