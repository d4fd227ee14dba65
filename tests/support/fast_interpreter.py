"""Triton's interpreter, quicker: what it looks up or makes anew for every operation is found once.

Most of its time went into book-keeping: for each function that a kernel calls it replaced all of `triton.language`
again, for each block it made the type and the shape of it, and for each sum of integers it computed whether they
overflow, which only an assertion would look at that it never makes. What kernels compute stays the same.
A plugin of pytest: `-p support.fast_interpreter`.
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
    """First asked for when nothing is replaced."""
    return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _names_of_builtins(package):
        member = getattr(package, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


class _Scope(interpreter._LangPatchScope):  # type: ignore[misc]
    """What a kernel has replaced, and of which modules: functions that it calls find them so."""

    modules: tuple[Any, ...] = ()

    def restore(self) -> None:
        super().restore()
        _replaced.difference_update(self.modules)


_replaced: set[Any] = set()
_patch_all = interpreter._patch_lang


@cache
def _modules_of(function: Any) -> tuple[Any, ...]:
    names = function.__globals__.values()
    return tuple(module for module in (tl, tl.core) if any(value is module for value in names))


def _patch_lang(function: Any) -> Any:
    """Of a kernel; of a function that it calls only what the kernel does not name itself."""
    scope = _Scope()
    modules = _modules_of(function)
    if not modules or not _replaced.issuperset(modules):
        scope._changes = _patch_all(function)._changes
        scope.modules = tuple(module for module in modules if module not in _replaced)
        _replaced.update(modules)
    return scope


_type_of_scalar = cache(interpreter._get_np_dtype)


def _get_np_dtype(kind: Any) -> np.dtype[Any]:
    """Of blocks that of their elements."""
    scalar = kind.scalar
    return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else _type_of_scalar(scalar)


@cache
def _shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """(shape, number of elements) of tensors of these sizes: nobody changes them."""
    return tl.core.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def _init_tensor(tensor: Any, handle: Any, kind: Any) -> None:
    tensor.handle = handle
    tensor.type = kind
    tensor.dtype = kind.scalar
    tensor.shape, tensor.numel = _shape_of(tuple(kind.shape.values) if kind.is_block() else ())


_init_new_block = tl.block_type.__init__
_known_blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}


def _init_block(block: Any, element: Any, shape: Any) -> None:
    """All that it knows is a function of its elements and sizes."""
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
