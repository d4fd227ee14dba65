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

__all__ = ["STARTUP_FAILURE", "FlowControl", "HttpToolsProtocol", "ServerState"]  # imported when they are asked for

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
    """Imports a private name of another package.

    Args:
        module: Module of the other package.
        name: Attribute or submodule of that module.
        tested: Versions of the package with which the caller was tested, for the error.

    Raises:
        UserError: The installed version lacks that name.
    """
    try:
        found = importlib.import_module(module)
        return getattr(found, name) if hasattr(found, name) else importlib.import_module(f"{module}.{name}")
    except ImportError as error:
        package = module.partition(".")[0]
        version = getattr(sys.modules.get(package), "__version__", "not installed")
        problem = f"this version lacks {module}.{name}, which nestrec uses"
        remedy = f"install a version that nestrec was tested with: {tested}"
        raise UserError(problem, option=package, value=version, remedy=remedy) from error


def run_exit_handlers() -> None:
    """Joins the threads that are not daemons and runs the `atexit` handlers, without ending the interpreter.

    Tested with Python 3.11. `multiprocessing` ends its processes in the same way. A version of Python that lacks one
    of the two functions skips that part with a warning in the log, as the work of the process is already done.
    """
    for module, name in EXIT_FUNCTIONS:
        function = getattr(importlib.import_module(module), name, None)
        if function is None:
            import logging

            logging.getLogger(__name__).warning("Python %s lacks %s.%s; skipping it", sys.version, module, name)
        else:
            function()


def numba_element_pointer(context: Any, builder: Any, array_type: Any, array: Any, indices: list[Any]) -> Any:
    """Returns the LLVM pointer to `array[*indices]` inside an intrinsic; the indices are not negative.

    Tested with numba 0.68.
    """
    tested = "numba 0.68"
    make_array = find_private("numba.np.arrayobj", "make_array", tested)
    get_item_pointer = find_private("numba.core.cgutils", "get_item_pointer", tested)
    return get_item_pointer(
        context, builder, array_type, make_array(array_type)(context, builder, array), indices, wraparound=False
    )


def numba_prefetch(builder: Any, pointer: Any) -> None:
    """Emits `llvm.prefetch` of the cache line at an LLVM pointer: data that is read and that stays in all caches.

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
    """Calls `torch._scaled_mm`, the matrix product of two fp8 matrices with a scale per row and column.

    Tested with torch 2.13.
    """
    import torch

    return torch._scaled_mm(*args, **kwargs)  # not `find_private`: torch.compile follows this function


def foreach_mul_(tensors: "Sequence[torch.Tensor]", factor: "torch.Tensor") -> None:
    """Multiplies all tensors by one factor in place, in few launches. Tested with torch 2.13."""
    find_private("torch", "_foreach_mul_", "torch 2.13")(tensors, factor)


def foreach_lerp_(tensors: "Sequence[torch.Tensor]", ends: "Sequence[torch.Tensor]", weight: float) -> None:
    """Moves each tensor by the part `weight` towards its end, in few launches. Tested with torch 2.13."""
    find_private("torch", "_foreach_lerp_", "torch 2.13")(tensors, ends, weight)


def foreach_copy_(targets: "Sequence[torch.Tensor]", sources: "Sequence[torch.Tensor]") -> None:
    """Copies each source into its target, in few launches. Tested with torch 2.13."""
    find_private("torch", "_foreach_copy_", "torch 2.13")(targets, sources)


def unsaved_buffers(module: "torch.nn.Module") -> set[str]:
    """Returns the names of a module's own buffers that its state dict leaves out. Tested with torch 2.13."""
    names: set[str] = module._non_persistent_buffers_set
    return names


def symmetric_memory() -> Any:
    """Returns the module `torch.distributed._symmetric_memory`: memory that peers map. Tested with torch 2.13."""
    return find_private("torch.distributed", "_symmetric_memory", "torch 2.13")


def uvicorn_name(name: str) -> Any:
    """Returns a class or constant of uvicorn that the HTTP layer builds on. Tested with uvicorn 0.54.

    Raises:
        UserError: The installed uvicorn is outside the tested range. The HTTP layer overrides methods of its protocol,
            so another version may lift a limit without an error.
    """
    check_uvicorn(importlib.import_module("uvicorn").__version__)
    return getattr(importlib.import_module(UVICORN_NAMES[name]), name)


def check_uvicorn(version: str) -> None:
    """Raises a `UserError` if a version of uvicorn is outside the tested range."""
    first, too_new = UVICORN_RANGE
    if not first <= tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < too_new:
        wanted = f"uvicorn>={'.'.join(map(str, first))},<{'.'.join(map(str, too_new))}"
        problem = "was not tested with nestrec, which builds on the insides of its HTTP protocol"
        raise UserError(problem, option="uvicorn", value=version, remedy=f"pip install '{wanted}'")


def stop_keep_alive_timer(protocol: "HttpToolsProtocol") -> None:
    """Stops uvicorn's timer that closes an idle connection. Tested with uvicorn 0.54."""
    protocol._unset_keepalive_if_required()
