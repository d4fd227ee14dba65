"""Tests that need TorchRec: `make test-torchrec` runs them in its separate environment.

The folder is not called torchrec because pytest adds tests/ to the import path, so the folder would shadow the package.
"""

import importlib.util
import warnings
from pathlib import Path

import pytest

HERE = Path(__file__).parent
IS_INSTALLED = importlib.util.find_spec("torchrec") is not None
if IS_INSTALLED:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchrec  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            # Warnings of TorchRec cannot be fixed here.
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            if not IS_INSTALLED:
                item.add_marker(
                    pytest.mark.skip(reason="TorchRec is not installed in this environment: run `make test-torchrec`")
                )
