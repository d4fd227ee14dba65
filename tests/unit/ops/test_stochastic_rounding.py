"""Rounding by chance: to a neighbour, with the mean where the value was, by the bits of a key and nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestrec.base.random import as_int64, fold, fold_array
from nestrec.ops.embedding.stochastic_rounding import HALF_TYPES, rounded, store_rounded

NUM_DRAWS = 20_000


def draws(count: int, seed: int = 0) -> torch.Tensor:
    return as_int64(fold_array(fold(seed), np.arange(count)))


def neighbours(value: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest number of the type that is no larger, the smallest that is no smaller; by counting bits up."""
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
def test_a_value_goes_to_a_neighbour_by_the_definition_and_by_the_loop(dtype, value, seed):
    values = torch.tensor([value, value * 1e-4, value * 1e-7, value * 2**-20]).repeat(8, 1)
    found = rounded(values, draws(8, seed), dtype)
    by_loop = torch.empty(8, 4, dtype=dtype)
    store_rounded(values, draws(8, seed), by_loop)
    assert torch.equal(found.view(torch.int16), by_loop.view(torch.int16))
    low, high = neighbours(values, dtype)
    assert ((found.float() == low) | (found.float() == high)).all()
    exact = values.to(dtype).float()
    assert torch.equal(rounded(exact, draws(8, seed), dtype).float(), exact), "what fits stays"


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("value", [1.001, -0.0213, 3.3e-5, -7.7e-6, 1.3e-8, 2.0**-30])
def test_the_mean_stays_where_the_value_was(dtype, value):
    """Subnormal numbers of float16 among them: within five standard errors of the mean of so many draws."""
    values = torch.full((NUM_DRAWS, 1), value)
    found = rounded(values, draws(NUM_DRAWS), dtype).double()
    low, high = (end.double()[0, 0] for end in neighbours(values[:1], dtype))
    exact = values.double()[0, 0]
    chance = (exact - low) / (high - low) if high > low else torch.zeros(())
    error = (high - low) * (chance * (1 - chance) / NUM_DRAWS).sqrt()
    assert abs(found.mean() - exact) <= 5 * error + abs(exact) * 2**-24
    assert len(found.unique()) == 2 or chance < 20 / NUM_DRAWS or chance > 1 - 20 / NUM_DRAWS


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_what_is_not_finite_stays_so_and_what_is_too_large_becomes_an_infinity(dtype):
    value = torch.tensor([[float("inf"), float("-inf"), float("nan"), 3.4028e38]]).repeat(64, 1)
    found = rounded(value, draws(64), dtype).float()
    assert (found[:, 0] == torch.inf).all()
    assert (found[:, 1] == -torch.inf).all()
    assert found[:, 2].isnan().all()
    largest = torch.finfo(dtype).max
    assert ((found[:, 3] == torch.inf) | (found[:, 3] == largest)).all()
    nan_of_low_bits = torch.tensor([[0x7F800001]], dtype=torch.int32).view(torch.float32)
    assert rounded(nan_of_low_bits, draws(1), dtype).isnan().all()


def test_elements_rows_and_keys_have_bits_of_their_own():
    values = torch.full((256, 64), 1.001)
    found = rounded(values, draws(256), torch.bfloat16)
    ups = (found > 1).double()
    assert not torch.equal(found, rounded(values, draws(256, seed=1), torch.bfloat16))
    assert abs(float(torch.corrcoef(ups.T).fill_diagonal_(0).mean())) < 0.01, "elements of a row"
    assert abs(float(torch.corrcoef(ups).fill_diagonal_(0).mean())) < 0.01, "rows"


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_a_nan_has_the_same_bits_wherever_it_was_made(dtype):
    """The one that a GPU computes, a CPU's (torch makes negative ones of bfloat16), and one with a message in it."""
    value = torch.tensor([[0x7FFFFFFF, 0x7FC00000, 0x7FA00001, -1, -0x400000]], dtype=torch.int32).view(torch.float32)
    by_loop = torch.empty(1, 5, dtype=dtype)
    store_rounded(value, draws(1), by_loop)
    for found in (rounded(value, draws(1), dtype), by_loop):
        assert found.isnan().all()
        assert len(found.view(torch.int16).unique()) == 1
