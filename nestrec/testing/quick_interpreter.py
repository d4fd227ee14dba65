"""Triton's interpreter, quicker: what it looks up for every function that a kernel calls is looked up once.

For each call it goes through all members of `triton.language`, to replace those that it has not replaced yet, and for
each value it makes the table of types anew: a third of the time of kernels under test. What is replaced stays the same.
A plugin of pytest: `-p nestrec.testing.quick_interpreter`.
"""

import inspect
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


@cache
def _names_of_builtins(package: Any) -> list[str]:
    """First asked for when nothing is replaced."""
    return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _names_of_builtins(package):
        member = getattr(package, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


_type_of_scalar = cache(interpreter._get_np_dtype)


def _get_np_dtype(kind: Any) -> np.dtype[Any]:
    """Of blocks that of their elements."""
    scalar = kind.scalar
    return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else _type_of_scalar(scalar)


interpreter._patch_builtin = _patch_builtin
interpreter._get_np_dtype = _get_np_dtype
