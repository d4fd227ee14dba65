"""Lazy imports: public names of a package, attributes named by strings, and packages of optional extras."""

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any


def lazy_exports(package: str, exports: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package.

    `dir`, `help` and shell completion then list the public names although they are not imported yet, but not the names
    that the package uses internally. Errors that the functions raise name options like Python arguments, without the
    dashes of the command line, which runs the same functions.

    Args:
        package: Name of the package.
        exports: Maps each public name to `module:attribute`.
    """

    @functools.cache
    def find(name: str) -> Any:
        if name not in exports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        exported = import_attribute(exports[name])
        return _called_from_python(package, exported) if isinstance(exported, FunctionType) else exported

    def names() -> list[str]:
        own = vars(sys.modules[package])
        listed = [name for name, value in own.items() if name.startswith("__") or isinstance(value, ModuleType)]
        return sorted({*exports, *listed})

    return find, names


def import_attribute(reference: Any) -> Any:
    """Import `module:attribute`; return a value that is not a string unchanged.

    Plugin specs and registry entries can be either, so that a registry does not import the modules of its entries.
    """
    if not isinstance(reference, str):
        return reference
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


INSTALL_BENCHMARKS = "in a clone of the repository: pip install ./benchmarks"
"""Instruction that installs the package nestrec-bench. Neither it nor nestrec is on PyPI."""


def install_extra(extra: str) -> str:
    """Return the instruction that installs an extra of nestrec from its source."""
    return f"in a clone of the repository: pip install '.[{extra}]'"


def import_extra(
    module: str, extra: str, problem: str, *, field: str = "package", value: Any = None, instead: str = ""
) -> Any:
    """Import a module of a package that only an extra installs, or a nestrec module that imports such packages.

    Args:
        module: Name of the module.
        extra: Extra of nestrec that installs the package.
        problem: Text of the error, such as "required to serve".
        field: Option that requires the package, if there is one.
        value: Value of that option; the missing module by default.
        instead: Alternative without the package, which the remedy ends with.

    Raises:
        UserError: The package is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = error.name or module
        if missing.partition(".")[0] == __name__.partition(".")[0]:
            raise  # a bug of nestrec, not a missing package
        remedy = f"{install_extra(extra)}{instead}"
        from nestrec.base.errors import UserError  # only in case of an error: importing the package must stay fast

        raise UserError(problem, option=field, value=value or missing, remedy=remedy) from error


def _called_from_python(package: str, function: FunctionType) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        from nestrec.base.errors import UserError

        try:
            return function(*args, **kwargs)
        except UserError as error:
            error.name_arguments()
            raise

    call.__module__ = package  # pickle looks the function up there
    return call
