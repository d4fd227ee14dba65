"""Fixtures shared by all tests."""

import os
from pathlib import Path

import pytest
from hypothesis import settings


def data_root() -> Path:
    """Where the real datasets lie: NESTREC_DATA, or beside the checkout."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    return Path(os.environ.get("NESTREC_DATA", default))


@pytest.fixture(scope="session")
def data_folder() -> Path:
    root = data_root()
    if not root.exists():
        pytest.skip("no real datasets here: set NESTREC_DATA to the folder that holds them")
    return root


settings.register_profile("nestrec", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("nestrec")
