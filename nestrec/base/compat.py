"""Private and undocumented names of other packages, each in a function that names the tested versions.

No other module of the package may use such names; `tests/meta/test_layout.py` checks it, and
`tests/unit/base/test_compat.py` calls every function below, so that an upgrade fails in one place. Packages are
imported inside the functions: loading this module loads none of them.

The classes of uvicorn are base classes and types elsewhere, so they are names of this module:
`from nestrec.base.compat import HttpToolsProtocol` imports uvicorn and checks its version.
"""

import importlib
import re
import sys
from typing import TYPE_CHECKING, Any

from nestrec.base.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from uvicorn.config import STARTUP_FAILURE
    from uvicorn.protocols.http.flow_control import FlowControl
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    from uvicorn.server import ServerState

__all__ = ["STARTUP_FAILURE", "FlowControl", "HttpToolsProtocol", "ServerState"]  # imported lazily by `__getattr__`

UVICORN_RANGE = ((0, 54), (0, 55))
"""First tested minor version, and the first one that is too new; `pyproject.toml` pins the same range."""
EXIT_FUNCTIONS = (("threading", "_shutdown"), ("atexit", "_run_exitfuncs"))
UVICORN_NAMES = {
    "FlowControl": "uvicorn.protocols.http.flow_control",
    "HttpToolsProtocol": "uvicorn.protocols.http.httptools_impl",
    "STARTUP_FAILURE": "uvicorn.config",
    "ServerState": "uvicorn.server",
}


def __getattr__(name: str) -> Any:
    if name in UVICORN_NAMES:
        return uvicorn_name(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def find_private(module: str, name: str, tested: str) -> Any:
    """Import a private name of another package.

    Args:
        module: Module of the other package.
        name: Attribute or submodule of that module.
        tested: Versions of the package with which the caller was tested, for the error.

    Raises:
        UserError: The installed version lacks that name.
    """
    try:
        imported = importlib.import_module(module)
        return getattr(imported, name) if hasattr(imported, name) else importlib.import_module(f"{module}.{name}")
    except ImportError as error:
        package = module.partition(".")[0]
        version = getattr(sys.modules.get(package), "__version__", "not installed")
        problem = f"this version lacks {module}.{name}, which nestrec uses"
        remedy = f"install a version that nestrec was tested with: {tested}"
        raise UserError(problem, option=package, value=version, remedy=remedy) from error


def run_exit_handlers() -> None:
    """Join all non-daemon threads and run the `atexit` handlers, without finalizing the interpreter.

    Tested with Python 3.11. `multiprocessing` ends its processes in the same way. If a version of Python lacks one of
    the two functions, this step is skipped with a warning, because the work of the process is already done.
    """
    for module, name in EXIT_FUNCTIONS:
        function = getattr(importlib.import_module(module), name, None)
        if function is None:
            import logging

            logging.getLogger(__name__).warning("Python %s lacks %s.%s; skipping it", sys.version, module, name)
        else:
            function()


def numba_element_pointer(context: Any, builder: Any, array_type: Any, array: Any, indices: list[Any]) -> Any:
    """Return the LLVM pointer to `array[*indices]` inside an intrinsic; the indices must not be negative.

    Tested with numba 0.68.
    """
    tested = "numba 0.68"
    make_array = find_private("numba.np.arrayobj", "make_array", tested)
    get_item_pointer = find_private("numba.core.cgutils", "get_item_pointer", tested)
    return get_item_pointer(
        context, builder, array_type, make_array(array_type)(context, builder, array), indices, wraparound=False
    )


def numba_prefetch(builder: Any, pointer: Any) -> None:
    """Emit `llvm.prefetch` (read access, high temporal locality) of the cache line at an LLVM pointer.

    Tested with numba 0.68.
    """
    tested = "numba 0.68"
    ir = find_private("numba.core.cgutils", "ir", tested)
    number = find_private("numba.core.cgutils", "int32_t", tested)
    address = builder.bitcast(pointer, find_private("numba.core.cgutils", "voidptr_t", tested))
    function_type = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
    function = builder.module.declare_intrinsic("llvm.prefetch", (address.type,), function_type)
    is_write, locality, is_data = number(0), number(3), number(1)
    builder.call(function, [address, is_write, locality, is_data])


def scaled_mm(*args: Any, **kwargs: Any) -> "torch.Tensor":
    """Call `torch._scaled_mm`, the matrix product of two fp8 matrices with a scale per row and column.

    Tested with torch 2.13.
    """
    import torch

    return torch._scaled_mm(*args, **kwargs)  # not by `find_private`: torch.compile traces this function


def foreach_mul_(tensors: "Sequence[torch.Tensor]", factor: "torch.Tensor") -> None:
    """Multiply all tensors by one factor in place, with few kernel launches. Tested with torch 2.13."""
    find_private("torch", "_foreach_mul_", "torch 2.13")(tensors, factor)


def foreach_lerp_(tensors: "Sequence[torch.Tensor]", ends: "Sequence[torch.Tensor]", weight: float) -> None:
    """Interpolate tensors in place towards their ends by `weight`, with few kernel launches. Tested with torch 2.13."""
    find_private("torch", "_foreach_lerp_", "torch 2.13")(tensors, ends, weight)


def foreach_copy_(targets: "Sequence[torch.Tensor]", sources: "Sequence[torch.Tensor]") -> None:
    """Copy each source into its target, with few kernel launches. Tested with torch 2.13."""
    find_private("torch", "_foreach_copy_", "torch 2.13")(targets, sources)


def unsaved_buffers(module: "torch.nn.Module") -> set[str]:
    """Return the names of the module's own non-persistent buffers. Tested with torch 2.13."""
    names: set[str] = module._non_persistent_buffers_set
    return names


def symmetric_memory() -> Any:
    """Return the module `torch.distributed._symmetric_memory` (peer-mapped memory). Tested with torch 2.13."""
    return find_private("torch.distributed", "_symmetric_memory", "torch 2.13")


def uvicorn_name(name: str) -> Any:
    """Import a class or constant of uvicorn that the HTTP layer builds on. Tested with uvicorn 0.54.

    Raises:
        UserError: The installed uvicorn is outside the tested range. The HTTP layer overrides methods of the protocol
            class, so an untested version could silently disable a limit.
    """
    check_uvicorn(importlib.import_module("uvicorn").__version__)
    return getattr(importlib.import_module(UVICORN_NAMES[name]), name)


def check_uvicorn(version: str) -> None:
    """Raise a `UserError` if the version of uvicorn is outside the tested range."""
    first, too_new = UVICORN_RANGE
    if not first <= tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < too_new:
        requirement = f"uvicorn>={'.'.join(map(str, first))},<{'.'.join(map(str, too_new))}"
        problem = "this version was not tested with nestrec, which uses internals of its HTTP protocol"
        raise UserError(problem, option="uvicorn", value=version, remedy=f"pip install '{requirement}'")


def stop_keep_alive_timer(protocol: "HttpToolsProtocol") -> None:
    """Stop uvicorn's timer that closes an idle connection. Tested with uvicorn 0.54."""
    protocol._unset_keepalive_if_required()
