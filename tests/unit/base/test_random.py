import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestrec.base.random import (
    GOLDEN64,
    as_int64,
    finalize64,
    fold,
    fold_array,
    mix32,
    mix64,
    mix64_array,
    shift_right,
    uniform24,
)
from nestrec.base.random import mix64_jit as compiled_mix64

int64s = st.integers(-(2**63), 2**63 - 1)


def mix32_python(x: int) -> int:
    """Compute `mix32` with Python integers, as the reference implementation."""
    x &= 0xFFFFFFFF
    x ^= x >> 16
    x = (x * 0x7FEB352D) & 0xFFFFFFFF
    x ^= x >> 15
    x = (x * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def uniform24_python(key: int, site: int, channel: int) -> int:
    key = (key & (2**64 - 1)) ^ mix64(site)
    low = key & 0xFFFFFFFF
    high = key >> 32
    return mix32_python(mix32_python(low ^ ((channel * 0x9E3779B9) & 0xFFFFFFFF)) ^ high) >> 8


def test_mix64_is_splitmix64() -> None:
    """The first outputs of the published generator with seed 1234567."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    golden = 0x9E3779B97F4A7C15
    assert [mix64(1234567 + index * golden) for index in range(3)] == expected


@given(st.lists(int64s))
def test_random_numpy_equals_python(values: list[int]) -> None:
    array = np.array(values, dtype=np.int64)
    assert mix64_array(array).tolist() == [mix64(value) for value in values]
    assert fold_array(fold(3, 4), array).tolist() == [fold(3, 4, value) for value in values]
    assert as_int64(mix64_array(array)).numpy().view(np.uint64).tolist() == [mix64(value) for value in values]


@given(st.integers(0, 2**64 - 1))
def test_random_numba_equals_python(value: int) -> None:
    assert int(compiled_mix64(np.uint64(value))) == mix64(value)
    assert int(finalize64(np.uint64((value + GOLDEN64) % 2**64))) == mix64(value)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_random_torch_equals_python(values: list[int]) -> None:
    mixed = mix32(torch.tensor(values, dtype=torch.int32))
    assert mixed.dtype == torch.int32
    assert [value & 0xFFFFFFFF for value in mixed.tolist()] == [mix32_python(value) for value in values]


@given(st.lists(int64s, max_size=5), st.integers(0, 2**64 - 1))
def test_uniform24_equals_reference_implementation(keys: list[int], site: int) -> None:
    drawn = uniform24(torch.tensor(keys, dtype=torch.int64), site, 3)
    assert drawn.shape == (len(keys), 3)
    assert drawn.tolist() == [[uniform24_python(key, site, channel) for channel in range(3)] for key in keys]


@given(st.integers(-(2**31), 2**31 - 1), st.integers(1, 31))
def test_shift_right_is_logical(value: int, bits: int) -> None:
    assert shift_right(torch.tensor([value], dtype=torch.int32), bits).item() == (value & 0xFFFFFFFF) >> bits


def test_random_mixers_are_bijections_on_a_sample() -> None:
    assert len({mix64(value) for value in range(10_000)}) == 10_000
    assert len(mix32(torch.arange(1 << 20, dtype=torch.int32)).unique()) == 1 << 20


def test_fold_depends_on_order_and_number_of_parts() -> None:
    assert len({fold(1, 2), fold(2, 1), fold(1), fold(1, 2, 0), fold(0, 1, 2), fold()}) == 6


def test_uniform24_is_independent_of_row_order() -> None:
    keys = as_int64(mix64_array(np.arange(1000)))
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(uniform24(keys, 5, 16)[order], uniform24(keys[order], 5, 16))
    assert torch.equal(uniform24(keys, 5, 16)[:, :7], uniform24(keys, 5, 7))


@pytest.mark.parametrize("keys", [torch.arange(4096), as_int64(mix64_array(np.arange(4096)))], ids=["plain", "mixed"])
def test_uniform24_is_uniform_and_independent(keys: torch.Tensor) -> None:
    drawn = uniform24(keys, 1, 64)
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) < 1 << 24
    counts = torch.bincount((drawn.flatten() >> 16).long(), minlength=256).double()
    expected = drawn.numel() / 256
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert 255 - 5 * (2 * 255) ** 0.5 < chi_square < 255 + 5 * (2 * 255) ** 0.5
    real = drawn.double() / 2**24 - 0.5
    other_site = uniform24(keys, 2, 64).double() / 2**24 - 0.5
    # A correlation of n independent pairs has a spread of 1/sqrt(n).
    for first, second in ((real, other_site), (real[1:], real[:-1]), (real[:, 1:], real[:, :-1])):
        assert abs(float((first * second).mean() * 12)) < 5 / first.numel() ** 0.5
