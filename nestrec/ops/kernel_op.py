"""Registration of custom PyTorch operators (`kernel_op`) and checks of whether Triton kernels can run.

    @kernel_op("name", fake=...)          under torch.compile: the operator nestrec::name, with a fake (meta) function
    def name(...): ...                    in eager mode: the launcher itself, without the overhead of the dispatcher

All operators of nestrec are registered here. The schema is inferred from the annotations of the launcher or passed as
text. On an H200, an eager call through the dispatcher cost about as much host time as the kernel launch. A call of an
operator from `torch.library.custom_op`, which has the same arguments, takes 20 microseconds through the dispatcher;
an operator from `kernel_op` takes 3.
"""

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter is on: kernels run on the CPU, element by element. Used by tests."""
HAS_TRITON = importlib.util.find_spec("triton") is not None and (torch.version.cuda is not None or IS_INTERPRETED)
"""Whether Triton kernels are available; only then is triton imported and are kernels defined."""


def runs_triton(tensor: torch.Tensor) -> bool:
    """Return whether Triton kernels can read this tensor."""
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
    """Register a kernel launcher as the PyTorch operator `nestrec::name`; use as a decorator.

    Args:
        name: Name of the operator, without namespace.
        fake: Fake (meta) function: has the arguments of the launcher and returns empty tensors shaped like its results.
        mutates: Names of the arguments that the launcher writes to.
        gradients: Backward function, as for `torch.library.register_autograd`. An operator without one is opaque to
            autograd: call it from a `torch.autograd.Function`, or if no gradient is needed.
        save: `setup_context` function of `torch.library.register_autograd`.
        schema: Schema of the arguments and the result, such as "(Tensor x) -> Tensor", for launchers that receive the
            fields of a struct as flat arguments; None infers it from the annotations of the launcher.

    Returns:
        A decorator. The decorated launcher is called directly in eager mode and through the operator under
        `torch.compile` or if it has gradients.
    """

    def register(launcher: Launcher) -> Launcher:
        operator = _define_operator(name, launcher, fake, mutates, schema)
        if gradients is not None:
            torch.library.register_autograd(f"nestrec::{name}", gradients, setup_context=save, lib=_LIBRARY)

        def call(*arguments: Any) -> Any:
            if gradients is not None or torch.compiler.is_compiling():
                return operator(*arguments)
            if torch.is_grad_enabled():
                with torch.no_grad():  # same as the operator, which records nothing for autograd
                    return launcher(*arguments)
            return launcher(*arguments)

        call.__doc__ = launcher.__doc__
        return call  # type: ignore[return-value]

    return register


def _define_operator(
    name: str, launcher: Callable[..., Any], fake: Callable[..., Any], mutates: Sequence[str], schema: str | None
) -> Any:
    """Define and return the operator `nestrec::name` for all devices."""
    if schema is None:
        _LIBRARY.define(torch.library.infer_schema(launcher, op_name=name, mutates_args=tuple(mutates)))
    else:
        assert not mutates, "an explicit schema already marks the mutated arguments"
        _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, launcher, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nestrec::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.nestrec, name).default


def runs_kernels(x: torch.Tensor) -> bool:
    """Return whether kernels support the device and dtype of `x`: a GPU, or any device under Triton's interpreter."""
    return runs_triton(x) and x.dtype in KERNEL_TYPES


def compute_type(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of matrix products: the autocast dtype if autocast is enabled, otherwise that of `x`."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()
