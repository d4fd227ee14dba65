import random

import numpy as np
import pytest
import torch

drawn = set[tuple[float, float, float]]()


@pytest.mark.parametrize("number", range(2))
def test_what_is_drawn_without_a_seed_does_not_depend_on_the_tests_before(number: int) -> None:
    """Which these are depends on how long others take, where several processes share the files."""
    drawn.add((random.random(), float(np.random.rand()), float(torch.rand(()))))  # noqa: NPY002
    assert len(drawn) == 1
