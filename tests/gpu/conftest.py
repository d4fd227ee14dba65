"""What every test on a GPU starts from."""

import warnings
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def sync_debug_mode() -> Iterator[None]:
    """Allows synchronizing calls before and after each test, whatever the test sets in between.

    The first call of a process warns that the mode is a prototype. As an error, that warning would end a test and leave
    the mode that the test has set to all later tests of the process.
    """
    if not torch.cuda.is_available():  # kernels are also tested under Triton's interpreter
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("default")
    yield
    torch.cuda.set_sync_debug_mode("default")
