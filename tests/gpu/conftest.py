"""Fixtures of the GPU tests."""

import warnings
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def sync_debug_mode() -> Iterator[None]:
    """Allow synchronizing calls before and after each test, whatever mode the test sets in between.

    The first call of a process warns that the mode is a prototype. That warning, treated as an error, would end a test
    and leave its mode set for all later tests of the process.
    """
    if not torch.cuda.is_available():  # kernels are also tested under Triton's interpreter
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("default")
    yield
    torch.cuda.set_sync_debug_mode("default")
