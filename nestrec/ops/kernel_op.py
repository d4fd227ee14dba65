"""The one way to make an operator of torch.

    @kernel_op("name", fake=...)          in torch.compile: the operator nestrec::name, shaped by its fake twin
    def name(...): ...                    in eager mode: the launcher itself, without the dispatcher's cost a call

The schema is read from the launcher's annotations, or given as text. Measured on an H200, an eager call through the
dispatcher cost the host about as much as the launch itself; and `torch.library.custom_op`, which takes the same
arguments, costs 20 microseconds a call through the dispatcher where the operators here cost 3.

Where Triton runs.
"""

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton kernels run on a CPU, element by element: for tests."""
HAS_TRITON = importlib.util.find_spec("triton") is not None and (torch.version.cuda is not None or IS_INTERPRETED)
"""Kernels are defined, and triton imported, only where this holds."""


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether kernels can take this tensor."""
    return HAS_TRITON and (tensor.is_cuda or IS_INTERPRETED)


Launcher = TypeVar("Launcher", bound=Callable[..., Any])
KERNEL_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_LIBRARY = torch.library.Library("nestrec", "FRAGMENT")


def kernel_op(
    name: str,
    *,
    fake: Callable[..., Any],
    mutates: Sequence[str] = (),
    gradients: Callable[..., Any] | None = None,
    save: Callable[..., None] | None = None,
    schema: str | None = None,
) -> Callable[[Launcher], Launcher]:
    """fake: takes the same arguments and returns empty tensors like the launcher's. mutates: arguments written to.

    gradients, save: its backward, as for `torch.library.register_autograd`. An operator without one is opaque to
    autograd: it is called from a `torch.autograd.Function`, or where no gradient is wanted.

    schema: arguments and result, such as "(Tensor x) -> Tensor", for launchers that take a struct as flat arguments.
    """

    def register(launcher: Launcher) -> Launcher:
        operator = _defined(name, launcher, fake, mutates, schema)
        if gradients is not None:
            torch.library.register_autograd(f"nestrec::{name}", gradients, setup_context=save, lib=_LIBRARY)

        def call(*arguments: Any) -> Any:
            if gradients is not None or torch.compiler.is_compiling():
                return operator(*arguments)
            if torch.is_grad_enabled():
                with torch.no_grad():  # as the operator: nothing is recorded
                    return launcher(*arguments)
            return launcher(*arguments)

        call.__doc__ = launcher.__doc__
        return call  # type: ignore[return-value]

    return register


def _defined(
    name: str, launcher: Callable[..., Any], fake: Callable[..., Any], mutates: Sequence[str], schema: str | None
) -> Any:
    """The operator `nestrec::name`, on every device."""
    if schema is None:
        _LIBRARY.define(torch.library.infer_schema(launcher, op_name=name, mutates_args=tuple(mutates)))
    else:
        assert not mutates, "a schema names the arguments that are written to"
        _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, launcher, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nestrec::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.nestrec, name).default


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
