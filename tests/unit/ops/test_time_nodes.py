"""Interpolation of the time function for distant pairs, in the Triton interpreter.

Pairs for which the interpolation would not be exact enough are treated as near pairs.
"""

import math

import numpy as np
import pytest
import torch

from nestrec.jagged import offsets_of
from nestrec.ops.attention.mask_and_bias import RelativeBias, functional_time_bias
from nestrec.ops.kernel_op import HAS_TRITON, IS_INTERPRETED

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.skipif(not (HAS_TRITON and IS_INTERPRETED), reason="needs Triton and TRITON_INTERPRET=1"),
]
LENGTHS = [330, 0, 3, 129]
TOLERANCE = 2.0**-9
"""Maximum error relative to the amplitude: half a unit of bfloat16, the precision of the biases of near pairs."""


def event_times(kind):
    """Return the event times of all sequences in seconds."""
    draw = np.random.default_rng(4)
    count = sum(LENGTHS)
    if kind == "regular":
        return np.arange(count) * 3600.0
    if kind == "sessions":  # events seconds apart, with days between sessions
        return np.cumsum(draw.integers(1, 20, count) * np.where(draw.random(count) < 0.03, 1e6, 1.0))
    if kind == "at once":
        return np.repeat(np.arange(count // 97 + 1), 97)[:count] * 1e5
    return draw.random(count) * 1e6


def compute_case(kind, power, amplitude=1.0):
    from nestrec.ops.attention.pair_tiles import plan_tiles
    from nestrec.ops.attention.time_nodes import compute_nodes

    seen = torch.from_numpy(event_times(kind))
    scalars = torch.tensor([amplitude, math.log(86400.0), math.log(power)])
    bias = RelativeBias(time_function=scalars, time_T=seen, query_time_T=seen + 5.0)
    offsets = offsets_of(torch.tensor(LENGTHS))
    plan, blocks = plan_tiles(offsets, sum(LENGTHS), max(LENGTHS), is_square=False, block=128)
    return compute_nodes(bias, plan, blocks, torch.bfloat16, is_reversed=False), bias, offsets, plan


def pairs_of_blocks(found, offsets, plan):
    """Yield (sequence, block of 64 queries, block of 128 keys, its tile of values, whether the pair is far)."""
    for number, length in enumerate(LENGTHS):
        slot = int(offsets[number]) // 128 + number
        for query_block in range(-(-length // 64)):
            for key_block in range(query_block // 2):
                tile = (int(plan.first_B[number]) + query_block * (query_block + 1) // 2 + 2 * key_block + 1) // 2
                is_far = key_block < int(found.near_from[slot + query_block // 2])
                assert is_far == (query_block // 2 >= int(found.far_from[slot + key_block])), "both bounds must agree"
                yield number, query_block, key_block, tile, is_far


@pytest.mark.parametrize(("kind", "power", "min_far_fraction"), [
    ("regular", 0.5, 1.0), ("regular", 2.0, 0.2), ("sessions", 0.8, 0.2), ("at once", 0.5, 0.2), ("shuffled", 0.5, 0.0),
])  # fmt: skip
def test_time_nodes_far_pairs_error_is_bounded(kind, power, min_far_fraction):
    found, bias, offsets, plan = compute_case(kind, power)
    is_far = []
    for number, query_block, key_block, tile, far in pairs_of_blocks(found, offsets, plan):
        is_far.append(far)
        start, end = offsets[number], offsets[number + 1]
        queries = slice(int(start + query_block * 64), int(min(start + query_block * 64 + 64, end)))
        keys = slice(int(start + key_block * 128), int(start + key_block * 128 + 128))
        times = bias.query_time_T[None, queries], bias.time_T[None, keys]
        exact = functional_time_bias(bias.time_function.double(), *times)[0]
        values = found.values[tile * 64 : tile * 64 + queries.stop - queries.start].double()
        if far:
            assert float((values @ found.basis[keys].double().T - exact).abs().max()) <= TOLERANCE
    assert min_far_fraction <= np.mean(is_far)
    assert kind != "shuffled" or not any(is_far)
    assert found.basis.isfinite().all()
    assert not found.values[found.zero_tile * 64 : found.zero_tile * 64 + 64].any()


def test_time_nodes_float16_error_is_bounded():
    for amplitude, power in ((1e5, 0.5), (1.0, 1e4)):
        found, _, offsets, plan = compute_case("regular", power, amplitude)
        assert not any(far for *_, far in pairs_of_blocks(found, offsets, plan))


def test_time_nodes_near_pairs_equal_written_biases():
    from nestrec.ops.attention.pair_tiles import write_bias

    found, bias, offsets, plan = compute_case("regular", 0.5)
    words = write_bias(
        bias, None, offsets, sum(LENGTHS), max(LENGTHS), plan, None,
        is_square=False, is_reversed=False, dtype=torch.bfloat16,
    ).words  # fmt: skip
    for number, length in enumerate(LENGTHS):
        for query_block in range(-(-length // 64)):
            first = int(plan.first_B[number]) + query_block * (query_block + 1) // 2 + query_block // 2 * 2
            assert torch.equal(
                found.words[first : first + query_block % 2 + 1], words[first : first + query_block % 2 + 1]
            )


def test_time_nodes_gradient_of_near_pairs_equals_reference():
    from nestrec.ops.attention.time_nodes import FunctionSums

    found, bias, offsets, plan = compute_case("sessions", 0.5, 0.7)
    pair_gradients = torch.full((plan.max_tiles, 2, 64, 64), float("nan"))
    scalars = bias.time_function.double().requires_grad_()
    draw = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=torch.float64)
    for number, length in enumerate(LENGTHS):
        start, slot = int(offsets[number]), int(offsets[number]) // 128 + number
        own = slice(start, start + length)
        exact = functional_time_bias(scalars, bias.query_time_T[None, own], bias.time_T[None, own])[0]
        for query_block in range(-(-length // 64)):
            for key_block in range(int(found.near_from[slot + query_block // 2]) * 2, query_block + 1):
                i, j = (torch.arange(64) + 64 * block for block in (query_block, key_block))
                g = torch.randn(2, 64, 64, generator=draw) * ((i[None, :] < length) & (j[:, None] <= i[None, :]))
                pair_gradients[int(plan.first_B[number]) + query_block * (query_block + 1) // 2 + key_block] = g
                i, j = i.clamp(max=length - 1), j.clamp(max=length - 1)
                total = total + (g.sum(0).double() * exact[i[None, :], j[:, None]]).sum() / 20.0
    sums = FunctionSums(bias, plan, found, 20.0)
    for head in range(2):
        assert not sums.add_near(pair_gradients[:, head : head + 1].contiguous()).any(), (
            "the gradients of far pairs must be zero"
        )
    (expected,) = torch.autograd.grad(total, scalars)
    assert float((sums.gradient().double() - expected).norm()) <= 1e-5 * float(expected.norm())
