import random

import numpy as np
import pytest
import torch

random_values = set[tuple[float, float, float]]()


@pytest.mark.parametrize("number", range(2))
def test_unseeded_random_values_do_not_depend_on_test_order(number: int) -> None:
    """If several processes share the test files, the earlier tests depend on timing."""
    random_values.add((random.random(), float(np.random.rand()), float(torch.rand(()))))  # noqa: NPY002
    assert len(random_values) == 1
