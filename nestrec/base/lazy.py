"""Imports at the first use: public names of a package, attributes named by strings, packages of the extras."""

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any


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
        found = import_attribute(exports[name])
        return _called_from_python(package, found) if isinstance(found, FunctionType) else found

    def names() -> list[str]:
        own = vars(sys.modules[package])
        listed = [name for name, value in own.items() if name.startswith("__") or isinstance(value, ModuleType)]
        return sorted({*exports, *listed})

    return find, names


def import_attribute(reference: Any) -> Any:
    """Imports `module:attribute`; returns anything that is not a string as it is.

    Specs of plugins and entries of registries hold either, so that naming an object does not import its module.
    """
    if not isinstance(reference, str):
        return reference
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


def import_extra(
    module: str, extra: str, problem: str, *, field: str = "package", value: Any = None, instead: str = ""
) -> Any:
    """Imports a module of a package that only an extra installs, or one of our modules that imports such packages.

    Args:
        module: Name of the module.
        extra: Extra of nestrec that installs the package.
        problem: Text of the error, such as "is needed to serve".
        field: Option that asks for the package, if there is one.
        value: Value of that option; the missing module by default.
        instead: What the user can do without the package, for the end of the error.

    Raises:
        UserError: The package is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = error.name or module
        if missing.partition(".")[0] == __name__.partition(".")[0]:
            raise  # a mistake of ours
        remedy = f"pip install 'nestrec[{extra}]'{instead}"
        from nestrec.base.errors import UserError  # only here: importing the package must stay quick

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

    call.__module__ = package  # where it is found when it is pickled
    return call
