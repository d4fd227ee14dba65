"""Bias-only attention: the strip of position weights, and kernels that fit the shared memory of a Hopper GPU.

The kernels are compiled for a Hopper GPU; no GPU is needed.
"""

import pytest
import torch

from nestrec.ops.attention.bias_only import (
    OTHERS,
    bias_attention,
    bias_attention_reference,
    pairs_tile,
    position_strip,
    product_tile,
)
from nestrec.ops.attention.mask_and_bias import RelativeBias

SHARED_BYTES = 232_448
"""Maximum shared memory per program on an H100 or H200, in bytes."""
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
KINDS = {"schedule": "i32", "state": "i32", "offsets": "i64", "buckets": "u8", "time": "fp64", "query_time": "fp64"}


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize(("longest", "size"), [(5, 9), (130, 299), (300, 41)])
def test_position_strip_contains_weight_of_each_pair(longest, size, is_reversed):
    """The table may be shorter or longer than the sequences."""
    table = torch.randn(size)
    strip, origin = position_strip(table, longest, is_reversed=is_reversed)
    for x in range(longest):
        for y in range(0, longest, OTHERS):
            for c in range(min(OTHERS, longest - y)):
                query, key = (y + c, x) if is_reversed else (x, y + c)
                distance = key - query + (size - 1) // 2
                expected = table[distance] if key <= query and distance >= 0 else 0.0
                assert strip[origin + x - y, c] == expected


@pytest.mark.parametrize("has_times", [False, True])
def test_bias_kernel_channels_equal_reference(has_times):
    """Compares padded blocks, to which the kernels are compared; includes sequences of zero tokens and of one token."""
    draw = torch.Generator().manual_seed(3)
    offsets = torch.tensor([0, 6, 6, 7, 16])
    total = 16
    leaves = [
        torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in [(16, 6), (17,), (5,)]
    ]
    v, position, buckets = leaves
    time = torch.rand(total, generator=draw, dtype=torch.float64).mul(1e4).cumsum(0)
    times = {"time_table": buckets, "time_T": time, "query_time_T": time + 7} if has_times else {}
    bias = RelativeBias(position_table=position, **times)
    fast = bias_attention(v, offsets, bias, max_length=9)
    slow = bias_attention_reference(v, offsets, bias)
    assert len(fast) == len(slow) == 1 + has_times
    weights = [torch.randn(out.shape, generator=draw, dtype=torch.float64) for out in slow]
    used = leaves if has_times else leaves[:2]
    found, expected = (torch.autograd.grad(out, used, weights) for out in (fast, slow))
    for a, b in zip([*fast, *found], [*slow, *expected], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        assert a.abs().sum() > 0


def shared_bytes(kernel, dtype, tile, **constants):
    """Return the shared memory of a kernel in bytes.

    Arguments that are not constants are pointers to `dtype` or to the type in KINDS, or integers.
    """
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {name: tile[name] for name in ("num_warps", "num_stages")}
    fixed = tile | constants | {"PRECISION": "tf32"}
    fixed = {name: value for name, value in fixed.items() if name not in options}
    numbers = {"first_item", "origin", "columns", "masked_bucket", "num_sequences", "num_splits"}
    numbers |= {"position_step", "time_step", "v_step", "window", "context"}
    names = kernel.arg_names
    signature = {name: "i32" if name in numbers else f"*{KINDS.get(name, NAMES[dtype])}" for name in names}
    signature |= dict.fromkeys(fixed, "constexpr")
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={(n,): [["tt.divisibility", 16]] for n, name in enumerate(names) if name not in fixed},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared


@pytest.mark.parametrize("dtype", NAMES)
def test_bias_kernel_tiles_fit_shared_memory(dtype):
    pytest.importorskip("triton")
    from nestrec.ops.attention.bias_only_kernels import (
        bias_function_kernel,
        bias_position_kernel,
        bias_product_kernel,
        bias_time_kernel,
    )

    rules = {"HAS_RULES": True}
    both = {"HAS_POSITION": True, "HAS_TIME": True, "REVERSED": True} | rules
    found = [
        shared_bytes(bias_product_kernel, dtype, product_tile(1024, dtype), **both),
        shared_bytes(bias_time_kernel, dtype, pairs_tile(1024), SLOTS=256, SPLITS=4, **rules),
        shared_bytes(bias_position_kernel, dtype, pairs_tile(1024), **rules),
        shared_bytes(bias_function_kernel, dtype, pairs_tile(1024), BN=OTHERS, SPLITS=4, FAST=True, **rules),
    ]
    assert all(0 < each <= SHARED_BYTES for each in found), found
