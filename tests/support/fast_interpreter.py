"""A pytest plugin that makes Triton's interpreter faster by caching lookups: `-p support.fast_interpreter`.

Most of the interpreter's time is bookkeeping. For each function that a kernel calls, it patches all of
`triton.language` again; for each block, it creates the type and the shape; for each sum of integers, it checks for an
overflow, and the result of the check is never used. The results of kernels do not change.
"""

import inspect
import math
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


@cache
def _names_of_builtins(package: Any) -> list[str]:
    """Return the names of the builtins; the first call must be before any of them is patched."""
    return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _names_of_builtins(package):
        member = getattr(package, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


class _Scope(interpreter._LangPatchScope):  # type: ignore[misc]
    """Patches of a kernel, which also apply to the functions that it calls."""

    modules: tuple[Any, ...] = ()
    """Modules that this scope has patched."""

    def restore(self) -> None:
        super().restore()
        _patched.difference_update(self.modules)


_patched: set[Any] = set()
_patch_all = interpreter._patch_lang


@cache
def _modules_of(function: Any) -> tuple[Any, ...]:
    names = function.__globals__.values()
    return tuple(module for module in (tl, tl.core) if any(value is module for value in names))


def _patch_lang(function: Any) -> Any:
    """Patch the modules that a kernel uses; a function that it calls needs patches only for further modules."""
    scope = _Scope()
    modules = _modules_of(function)
    if not modules or not _patched.issuperset(modules):
        scope._changes = _patch_all(function)._changes
        scope.modules = tuple(module for module in modules if module not in _patched)
        _patched.update(modules)
    return scope


_type_of_scalar = cache(interpreter._get_np_dtype)


def _get_np_dtype(kind: Any) -> np.dtype[Any]:
    """Return the NumPy type of a scalar, or of the elements of a block."""
    scalar = kind.scalar
    return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else _type_of_scalar(scalar)


@cache
def _shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """Return the shape and the number of elements of tensors of these sizes; both are immutable and thus shared."""
    return tl.core.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def _init_tensor(tensor: Any, handle: Any, kind: Any) -> None:
    tensor.handle = handle
    tensor.type = kind
    tensor.dtype = kind.scalar
    tensor.shape, tensor.numel = _shape_of(tuple(kind.shape.values) if kind.is_block() else ())


_init_new_block = tl.block_type.__init__
_known_blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}


def _init_block(block: Any, element: Any, shape: Any) -> None:
    """Initialize a block type from the cache; its attributes depend only on the type of its elements and its sizes."""
    key = element.name, tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
    known = _known_blocks.get(key)
    if known is None:
        _init_new_block(block, element, shape)
        _known_blocks[key] = dict(block.__dict__)
    else:
        block.__dict__.update(known)


def _is_itself_or(equals: Any) -> Any:
    return lambda kind, other: kind is other or equals(kind, other)


interpreter._patch_builtin = _patch_builtin
interpreter._patch_lang = _patch_lang
interpreter._get_np_dtype = _get_np_dtype
tl.tensor.__init__ = _init_tensor
tl.block_type.__init__ = _init_block
for kind in (tl.dtype, tl.pointer_type):
    kind.__eq__ = _is_itself_or(kind.__eq__)
TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
