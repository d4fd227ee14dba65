"""FP8 matrix products equal their reference, and layers that use them are close to bfloat16 layers."""

# ruff: noqa: PLR0917

import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.ops.kernel_op import IS_INTERPRETED
from nestrec.ops.layers.fp8 import (
    fp8_enabled,
    fp8_matmul,
    fp8_matmul_reference,
    quantize_fp8_rows,
    quantize_fp8_rows_reference,
)
from nestrec.ops.layers.fused_layers import Dropout, feed_forward, gated_output, norm_projection

pytestmark = pytest.mark.gpu
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16
on_gpu = pytest.mark.skipif(IS_INTERPRETED, reason="FP8 matrix products need a GPU")
UNIT = 2.0**-4
"""Twice the rounding error of e4m3, which has three mantissa bits."""


@pytest.mark.parametrize("shape", [(1, 16), (37, 48), (130, 96), (5, 640), (3, 3072)])
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_fp8_row_quantization_equals_reference(shape, dtype):
    torch.manual_seed(0)
    x = (torch.randn(shape, device=DEVICE) * torch.logspace(-6, 4, shape[0], device=DEVICE)[:, None]).to(dtype)
    x[0] = 0.0
    x = torch.cat([x, x], dim=1)[:, : shape[1]]
    (rows, scale) = quantize_fp8_rows(x)
    (expected, expected_scale) = quantize_fp8_rows_reference(x)
    assert torch.equal(scale, expected_scale)
    found = rows.view(torch.uint8)
    bits = expected.view(torch.uint8)
    if IS_INTERPRETED:  # the interpreter rounds ties differently, and does not carry into the exponent
        has_mantissa = (bits & 7) != 0
        assert (found[has_mantissa].int() - bits[has_mantissa].int()).abs().le(1).all()
    else:
        assert torch.equal(found, bits)


@on_gpu
@pytest.mark.parametrize(
    ("tokens", "inner", "outer"), [(1, 64, 128), (777, 1024, 4096), (4096, 4096, 1024), (0, 32, 16)]
)
def test_fp8_matmul_equals_reference_and_is_deterministic(tokens, inner, outer):
    torch.manual_seed(0)
    a = torch.randn(tokens, inner, device=DEVICE, dtype=HALF) * torch.rand(tokens, 1, device=DEVICE, dtype=HALF)
    b = torch.randn(inner, outer, device=DEVICE, dtype=HALF)
    found = fp8_matmul(a, b)
    expected = fp8_matmul_reference(a, b)
    assert torch.equal(found, fp8_matmul(a, b))
    bias = torch.randn(outer, device=DEVICE, dtype=HALF)
    torch.testing.assert_close(fp8_matmul(a, b, bias), found + bias, rtol=0.02, atol=0.02 * inner**0.5)
    assert (found - expected).float().norm() <= 0.01 * expected.float().norm()
    exact = a.double() @ b.double()
    assert (found - exact).norm() <= UNIT * exact.norm()


@on_gpu
def test_fp8_matmul_rejects_unsupported_widths():
    a, b = torch.zeros(4, 50, device=DEVICE, dtype=HALF), torch.zeros(50, 200, device=DEVICE, dtype=HALF)
    with pytest.raises(UserError, match="multiples of 16"):
        fp8_matmul(a, b)


def layer(x, delta, uvqk, output, bias, up, down):
    width = output.shape[1]
    drop = Dropout(None, 1, 0.0)
    projected = norm_projection(x, delta, uvqk, (width,) * 4, norm="layer", eps=1e-6)
    mixed = projected.parts[0] + projected.parts[1] * projected.parts[2]
    out = gated_output((mixed,), projected.gate, output, bias, drop, norm="layer", eps=1e-6, packed=projected.packed)
    total, new = feed_forward(projected.total, out, up, down, drop, eps=1e-6)
    return total + new


@on_gpu
def test_fp8_layer_is_close_to_bf16_layer():
    torch.manual_seed(0)
    dim, width, tokens = 256, 128, 1000
    shapes = [(tokens, dim), (tokens, dim), (dim, 4 * width), (dim, width), (dim,), (dim, 2 * width), (width, dim)]
    leaves = [torch.randn(s, device=DEVICE) * (1.0 if s[0] == tokens else s[0] ** -0.5) for s in shapes]

    def results(fp8):
        own = [leaf.clone().requires_grad_() for leaf in leaves]
        with torch.autocast("cuda", HALF), fp8_enabled(fp8):
            out = layer(*own)
        torch.manual_seed(1)
        return [out.detach(), *torch.autograd.grad(out, own, torch.randn_like(out))]

    plain, ours, again = results(False), results(True), results(True)
    for number, (a, b, c) in enumerate(zip(ours, plain, again, strict=True)):
        assert torch.equal(a, c), number
        error = float((a - b).float().norm() / b.float().norm())
        assert 0.0 < error < 0.12 or (number == 5 and error < 0.12), (number, error)
