"""The time function of far pairs at nodes, in Triton's interpreter: exact enough, near wherever it would not be."""

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
"""of the amplitude: half a unit of bfloat16, in which words of near pairs are kept"""


def times_of(kind):
    """Seconds at which events were seen, of all sequences together."""
    draw = np.random.default_rng(4)
    count = sum(LENGTHS)
    if kind == "regular":
        return np.arange(count) * 3600.0
    if kind == "sessions":  # seconds apart, with weeks between
        return np.cumsum(draw.integers(1, 20, count) * np.where(draw.random(count) < 0.03, 1e6, 1.0))
    if kind == "at once":
        return np.repeat(np.arange(count // 97 + 1), 97)[:count] * 1e5
    return draw.random(count) * 1e6


def found_for(kind, power, amplitude=1.0):
    from nestrec.ops.attention.pair_tiles import plan_tiles
    from nestrec.ops.attention.time_nodes import find_nodes

    seen = torch.from_numpy(times_of(kind))
    scalars = torch.tensor([amplitude, math.log(86400.0), math.log(power)])
    bias = RelativeBias(time_function=scalars, time_T=seen, query_time_T=seen + 5.0)
    offsets = offsets_of(torch.tensor(LENGTHS))
    plan, blocks = plan_tiles(offsets, sum(LENGTHS), max(LENGTHS), is_square=False, block=128)
    return find_nodes(bias, plan, blocks, torch.bfloat16, is_reversed=False), bias, offsets, plan


def pairs_of_blocks(found, offsets, plan):
    """(sequence, block of 64 queries, block of 128 keys, its tile of values, whether it is far)"""
    for number, length in enumerate(LENGTHS):
        slot = int(offsets[number]) // 128 + number
        for asks in range(-(-length // 64)):
            for sees in range(asks // 2):
                tile = (int(plan.first_B[number]) + asks * (asks + 1) // 2 + 2 * sees + 1) // 2
                is_far = sees < int(found.near_from[slot + asks // 2])
                assert is_far == (asks // 2 >= int(found.far_from[slot + sees])), "both bounds say the same"
                yield number, asks, sees, tile, is_far


@pytest.mark.parametrize(("kind", "power", "least"), [
    ("regular", 0.5, 1.0), ("regular", 2.0, 0.2), ("sessions", 0.8, 0.2), ("at once", 0.5, 0.2), ("shuffled", 0.5, 0.0),
])  # fmt: skip
def test_far_pairs_are_as_exact_as_written_biases(kind, power, least):
    found, bias, offsets, plan = found_for(kind, power)
    is_far = []
    for number, asks, sees, tile, far in pairs_of_blocks(found, offsets, plan):
        is_far.append(far)
        start, end = offsets[number], offsets[number + 1]
        queries = slice(int(start + asks * 64), int(min(start + asks * 64 + 64, end)))
        keys = slice(int(start + sees * 128), int(start + sees * 128 + 128))
        times = bias.query_time_T[None, queries], bias.time_T[None, keys]
        exact = functional_time_bias(bias.time_function.double(), *times)[0]
        values = found.values[tile * 64 : tile * 64 + queries.stop - queries.start].double()
        if far:
            assert float((values @ found.basis[keys].double().T - exact).abs().max()) <= TOLERANCE
    assert least <= np.mean(is_far)
    assert kind != "shuffled" or not any(is_far)
    assert found.basis.isfinite().all()
    assert not found.values[found.zero_tile * 64 : found.zero_tile * 64 + 64].any()


def test_what_float16_does_not_hold_is_near():
    for amplitude, power in ((1e5, 0.5), (1.0, 1e4)):
        found, _, offsets, plan = found_for("regular", power, amplitude)
        assert not any(far for *_, far in pairs_of_blocks(found, offsets, plan))


def test_near_pairs_have_the_words_of_written_biases():
    from nestrec.ops.attention.pair_tiles import write_bias

    found, bias, offsets, plan = found_for("regular", 0.5)
    words = write_bias(
        bias, None, offsets, sum(LENGTHS), max(LENGTHS), plan, None,
        is_square=False, is_reversed=False, dtype=torch.bfloat16,
    ).words  # fmt: skip
    for number, length in enumerate(LENGTHS):
        for asks in range(-(-length // 64)):
            first = int(plan.first_B[number]) + asks * (asks + 1) // 2 + asks // 2 * 2
            assert torch.equal(found.words[first : first + asks % 2 + 1], words[first : first + asks % 2 + 1])


def test_the_gradient_over_near_pairs_is_that_of_the_definition():
    from nestrec.ops.attention.time_nodes import FunctionSums

    found, bias, offsets, plan = found_for("sessions", 0.5, 0.7)
    kept = torch.full((plan.most, 2, 64, 64), float("nan"))
    scalars = bias.time_function.double().requires_grad_()
    draw = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=torch.float64)
    for number, length in enumerate(LENGTHS):
        start, slot = int(offsets[number]), int(offsets[number]) // 128 + number
        own = slice(start, start + length)
        exact = functional_time_bias(scalars, bias.query_time_T[None, own], bias.time_T[None, own])[0]
        for asks in range(-(-length // 64)):
            for sees in range(int(found.near_from[slot + asks // 2]) * 2, asks + 1):
                i, j = (torch.arange(64) + 64 * block for block in (asks, sees))
                g = torch.randn(2, 64, 64, generator=draw) * ((i[None, :] < length) & (j[:, None] <= i[None, :]))
                kept[int(plan.first_B[number]) + asks * (asks + 1) // 2 + sees] = g
                i, j = i.clamp(max=length - 1), j.clamp(max=length - 1)
                total = total + (g.sum(0).double() * exact[i[None, :], j[:, None]]).sum() / 20.0
    sums = FunctionSums(bias, plan, found, 20.0)
    for head in range(2):
        assert not sums.add_near(kept[:, head : head + 1].contiguous()).any(), "a place for those of far pairs"
    (expected,) = torch.autograd.grad(total, scalars)
    assert float((sums.gradient().double() - expected).norm()) <= 1e-5 * float(expected.norm())
