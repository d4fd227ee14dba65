"""Public names of a package that are imported when they are first asked for."""

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def lazy_exports(package: str, exports: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package.

    `dir`, `help` and the completion of a shell then list the public names although they are not imported yet, and list
    none of the names that the package needs only for itself.

    Args:
        package: Name of the package.
        exports: Maps each public name to `module:attribute`.
    """

    def find(name: str) -> Any:
        if name not in exports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, attribute = exports[name].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def names() -> list[str]:
        own = vars(sys.modules[package])
        listed = [name for name, value in own.items() if name.startswith("__") or isinstance(value, ModuleType)]
        return sorted({*exports, *listed})

    return find, names
