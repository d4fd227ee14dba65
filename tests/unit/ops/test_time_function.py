"""The functional time bias: formula, gradients and required inputs."""

import math

import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.ops.attention.bias_only import bias_attention, bias_attention_reference
from nestrec.ops.attention.mask_and_bias import RelativeBias, functional_time_bias, initial_time_function

SCALARS = (0.7, math.log(3600.0), math.log(0.4))
FAR = torch.tensor([-5.0, 0.0, 0.3, 1.0, 59.0, 3600.0, 1e5, 1e9, 1e18, 1e300], dtype=torch.float64)


def values(scalars, delta_s):
    return functional_time_bias(scalars, delta_s[None], delta_s.new_zeros(1, len(delta_s)))[0, :, 0]


def test_time_function_equals_published_formula():
    amplitude = SCALARS[0]
    scale = math.exp(SCALARS[1])
    power = math.exp(SCALARS[2])
    gamma = math.exp(-(scale**-power))
    expected = [amplitude * gamma ** (max(dt, 1.0) ** power) for dt in FAR.tolist()]
    found = values(torch.tensor(SCALARS, dtype=torch.float64), FAR)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-300)


def test_time_function_gradients_equal_finite_differences():
    scalars = torch.tensor(SCALARS, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: values(s, FAR), (scalars,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_time_function_is_finite_for_extreme_parameters(dtype):
    for scale in (-60.0, 0.0, 60.0):
        for power in (-60.0, 0.0, 60.0):
            scalars = torch.tensor([3.0, scale, power], dtype=dtype).requires_grad_()
            found = values(scalars, FAR)
            (gradient,) = torch.autograd.grad(found.sum(), scalars)
            assert found.isfinite().all()
            assert (found.abs() <= 3.0).all()
            assert gradient.isfinite().all()


def test_time_function_initially_decays_over_history():
    scalars = initial_time_function().detach()
    minute, day, month = (values(scalars, torch.tensor([60.0 * n], dtype=torch.float64)) for n in (1, 1440, 43200))
    assert (minute / scalars[0] > 0.9).all()
    assert (day / scalars[0] > 0.2).all()
    assert (month / scalars[0] < 0.05).all()


def test_time_function_fuxi_channel_equals_reference():
    generator = torch.Generator().manual_seed(1)
    offsets = torch.tensor([0, 4, 4, 11])
    v = torch.randn(11, 6, generator=generator, dtype=torch.float64)
    time = torch.rand(11, generator=generator, dtype=torch.float64).mul(1e5).cumsum(0)
    inputs = [v.requires_grad_(), torch.tensor(SCALARS, dtype=torch.float64).requires_grad_()]
    bias = RelativeBias(
        position_table=torch.zeros(13, dtype=torch.float64), time_function=inputs[1], time_T=time, query_time_T=time + 9
    )
    fast = bias_attention(v, offsets, bias, max_length=7)[1]
    slow = bias_attention_reference(v, offsets, bias)[1]
    weight = torch.randn_like(slow)
    for a, b in zip(*(torch.autograd.grad(y, inputs, weight) for y in (fast, slow)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-12)


def test_time_function_requires_times():
    scalars = torch.tensor(SCALARS)
    time = torch.zeros(2, dtype=torch.float64)
    with pytest.raises(UserError, match="time_function"):
        RelativeBias(time_function=scalars)
    with pytest.raises(UserError, match="time_table and time_function"):
        RelativeBias(time_function=scalars, time_table=torch.zeros(3), time_T=time, query_time_T=time)
