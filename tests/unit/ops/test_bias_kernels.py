"""Kernels of attention by bias alone fit the shared memory of a Hopper GPU. Compiled for it here, without one."""

import pytest
import torch

from nestrec.ops.bias_attention import bias_tile

triton = pytest.importorskip("triton")

SHARED_BYTES = 232_448
"""that one program may have on an H100 or H200"""
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def shared_bytes(kernel, pointers, values, tile, **constants):
    """pointers: element type by argument; values: names of integers."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {name: tile[name] for name in ("num_warps", "num_stages")}
    fixed = constants | {name: value for name, value in tile.items() if name not in options}
    signature = {name: f"*{pointers[name]}" if name in pointers else "i32" for name in kernel.arg_names}
    signature |= dict.fromkeys(fixed, "constexpr")
    place = {name: (number,) for number, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        fn=kernel, signature=signature, constexprs={place[name]: value for name, value in fixed.items()},
        attrs={place[name]: [["tt.divisibility", 16]] for name in pointers},
    )  # fmt: skip
    assert set(kernel.arg_names) == {*pointers, *values, *fixed}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared


@pytest.mark.parametrize("dtype", NAMES)
def test_the_largest_tile_fits_shared_memory(dtype):
    """Both channels at once have the most operands on their way."""
    from nestrec.ops.bias_kernels import bias_value_gradient_kernel

    pointers = dict.fromkeys(("grad_position", "grad_time", "out"), NAMES[dtype])
    pointers |= dict.fromkeys(("position", "time_table"), "fp32") | {"offsets": "i64"}
    pointers |= dict.fromkeys(("query_time", "time", "edges"), "fp64")
    values = ("num_sequences", "num_blocks", "centre", "num_buckets")
    tile = bias_tile(1024, dtype, products=2)
    found = shared_bytes(bias_value_gradient_kernel, pointers, values, tile, HAS_TIME=True, PRECISION="tf32")
    assert 0 < found <= SHARED_BYTES
