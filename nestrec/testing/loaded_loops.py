"""Loaded by the server that tests fork ranks from: loops of training that are compiled already, once for all ranks.

Each of hundreds of ranks would read them from the cache beside the modules, a third of a second of its own.
"""

import importlib
import pkgutil
import sys
from collections.abc import Iterator

from numba.core.dispatcher import Dispatcher

import nestrec.embedding.optimizers
import nestrec.pipeline.schedules

CHOSEN_BY_NAME = (nestrec.embedding.optimizers, nestrec.pipeline.schedules)
FOLDERS = ("balance", "data.samples", "data.gather", "embedding", "ops.rows", "ops.losses", "pipeline", "tasks")


def compiled_loops() -> Iterator[Dispatcher]:
    """Of the modules of these folders that are loaded."""
    beginnings = tuple(f"nestrec.{folder}" for folder in FOLDERS)
    for name, module in list(sys.modules.items()):
        if name.startswith(beginnings):
            found = (value for value in vars(module).values() if isinstance(value, Dispatcher))
            yield from (loop for loop in found if loop.py_func.__module__ == name)


def load_compiled(loop: Dispatcher) -> None:
    """For all types that it was compiled for."""
    for arguments, *_ in loop._cache._cache_file._load_index():  # type: ignore[attr-defined]
        loop.compile(arguments)


for _folder in CHOSEN_BY_NAME:
    for _module in pkgutil.iter_modules(_folder.__path__, f"{_folder.__name__}."):
        importlib.import_module(_module.name)
for _loop in compiled_loops():
    load_compiled(_loop)
