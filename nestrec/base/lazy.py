"""Public names of a package that are imported when they are first asked for."""

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

from nestrec.base.errors import UserError


def lazy_exports(package: str, exports: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package.

    `dir`, `help` and the completion of a shell then list the public names although they are not imported yet, and list
    none of the names that the package needs only for itself. Functions raise errors that name options as arguments:
    the same functions run for the command line, where options have dashes.

    Args:
        package: Name of the package.
        exports: Maps each public name to `module:attribute`.
    """

    @functools.cache
    def find(name: str) -> Any:
        if name not in exports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, attribute = exports[name].partition(":")
        found = getattr(importlib.import_module(module), attribute)
        return _called_from_python(package, found) if isinstance(found, FunctionType) else found

    def names() -> list[str]:
        own = vars(sys.modules[package])
        listed = [name for name, value in own.items() if name.startswith("__") or isinstance(value, ModuleType)]
        return sorted({*exports, *listed})

    return find, names


def _called_from_python(package: str, function: FunctionType) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except UserError as error:
            error.name_arguments()
            raise

    call.__module__ = package  # where it is found when it is pickled
    return call
