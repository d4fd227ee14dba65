"""Stochastic rounding: to an adjacent number, unbiased, and a function of the value and the key only."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestrec.base.random import as_int64, fold, fold_array
from nestrec.ops.embedding.stochastic_rounding import HALF_TYPES, round_stochastically, store_rounded

NUM_DRAWS = 20_000


def draws(count: int, seed: int = 0) -> torch.Tensor:
    return as_int64(fold_array(fold(seed), np.arange(count)))


def adjacent_numbers(value: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest number of the dtype that is not larger and the smallest that is not smaller."""
    size = value.abs()
    below = size.to(dtype)
    below = torch.where(below.float() > size, (below.view(torch.int16) - 1).view(dtype), below)
    above = torch.where(below.float() < size, (below.view(torch.int16) + 1).view(dtype), below)
    low = below.float() * value.sign()
    high = above.float() * value.sign()
    return torch.minimum(low, high), torch.maximum(low, high)


@pytest.mark.parametrize("dtype", HALF_TYPES)
@given(value=st.floats(-6e4, 6e4, width=32, allow_subnormal=False), seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_stochastic_rounding_host_loop_equals_reference(dtype, value, seed):
    values = torch.tensor([value, value * 1e-4, value * 1e-7, value * 2**-20]).repeat(8, 1)
    found = round_stochastically(values, draws(8, seed), dtype)
    by_loop = torch.empty(8, 4, dtype=dtype)
    store_rounded(values, draws(8, seed), by_loop)
    assert torch.equal(found.view(torch.int16), by_loop.view(torch.int16))
    low, high = adjacent_numbers(values, dtype)
    assert ((found.float() == low) | (found.float() == high)).all()
    exact = values.to(dtype).float()
    assert torch.equal(round_stochastically(exact, draws(8, seed), dtype).float(), exact), (
        "representable values do not change"
    )


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("value", [1.001, -0.0213, 3.3e-5, -7.7e-6, 1.3e-8, 2.0**-30])
def test_stochastic_rounding_is_unbiased(dtype, value):
    """The mean of NUM_DRAWS draws is within five standard errors; values include subnormal float16 numbers."""
    values = torch.full((NUM_DRAWS, 1), value)
    found = round_stochastically(values, draws(NUM_DRAWS), dtype).double()
    low, high = (end.double()[0, 0] for end in adjacent_numbers(values[:1], dtype))
    exact = values.double()[0, 0]
    probability = (exact - low) / (high - low) if high > low else torch.zeros(())
    error = (high - low) * (probability * (1 - probability) / NUM_DRAWS).sqrt()
    assert abs(found.mean() - exact) <= 5 * error + abs(exact) * 2**-24
    assert len(found.unique()) == 2 or probability < 20 / NUM_DRAWS or probability > 1 - 20 / NUM_DRAWS


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_stochastic_rounding_of_nonfinite_and_large_values(dtype):
    value = torch.tensor([[float("inf"), float("-inf"), float("nan"), 3.4028e38]]).repeat(64, 1)
    found = round_stochastically(value, draws(64), dtype).float()
    assert (found[:, 0] == torch.inf).all()
    assert (found[:, 1] == -torch.inf).all()
    assert found[:, 2].isnan().all()
    largest = torch.finfo(dtype).max
    assert ((found[:, 3] == torch.inf) | (found[:, 3] == largest)).all()
    nan_of_low_bits = torch.tensor([[0x7F800001]], dtype=torch.int32).view(torch.float32)
    assert round_stochastically(nan_of_low_bits, draws(1), dtype).isnan().all()


def test_stochastic_rounding_elements_are_independent():
    values = torch.full((256, 64), 1.001)
    found = round_stochastically(values, draws(256), torch.bfloat16)
    ups = (found > 1).double()
    assert not torch.equal(found, round_stochastically(values, draws(256, seed=1), torch.bfloat16))
    assert abs(float(torch.corrcoef(ups.T).fill_diagonal_(0).mean())) < 0.01, "elements of a row"
    assert abs(float(torch.corrcoef(ups).fill_diagonal_(0).mean())) < 0.01, "rows"


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_stochastic_rounding_nan_is_canonical(dtype):
    """Inputs include the NaN of a GPU, the NaN of a CPU (negative if PyTorch converts from bfloat16), and a payload."""
    value = torch.tensor([[0x7FFFFFFF, 0x7FC00000, 0x7FA00001, -1, -0x400000]], dtype=torch.int32).view(torch.float32)
    by_loop = torch.empty(1, 5, dtype=dtype)
    store_rounded(value, draws(1), by_loop)
    for found in (round_stochastically(value, draws(1), dtype), by_loop):
        assert found.isnan().all()
        assert len(found.view(torch.int16).unique()) == 1
