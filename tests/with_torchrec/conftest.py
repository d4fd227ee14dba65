"""These tests need TorchRec, which has an environment of its own: `make test-torchrec` runs them there.

The folder is not called torchrec: pytest puts tests/ on the path, where it would pass for the package.
"""

import importlib.util
import warnings
from pathlib import Path

import pytest

HERE = Path(__file__).parent
IS_THERE = importlib.util.find_spec("torchrec") is not None
if IS_THERE:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchrec  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            # What TorchRec warns of is not ours to mend.
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            if not IS_THERE:
                item.add_marker(pytest.mark.skip(reason="TorchRec is not installed here: run `make test-torchrec`"))
