"""Layer kernels without a GPU: tile sizes, operators and rejected inputs."""

import pytest
import torch

import nestrec.ops.layers.row_ops  # noqa: F401 - registers its operators
from nestrec.base.errors import UserError
from nestrec.ops.layers.row_ops import (
    check_parts,
    check_rows,
    check_strided,
    norm_rows,
    part_grid,
    part_tile,
    row_grid,
    row_tile,
)


@pytest.mark.parametrize("width", [1, 7, 50, 1024, 3000])
@pytest.mark.parametrize("tokens", [0, 1, 5, 4097])
def test_layer_kernel_tiles_cover_all_rows_and_channels(tokens, width):
    x = torch.empty(tokens, width, device="meta")
    for parts in (1, 2, 3):
        tile = row_tile(width, parts)
        assert row_grid(x, parts)[0] * tile["ROWS"] >= tokens
        assert tile["BLOCK"] >= width
    tile = part_tile(width)
    (rows, columns) = part_grid(x)
    assert rows * tile["ROWS"] >= tokens
    assert columns * tile["BLOCK"] >= width


def test_layer_kernels_reject_unsupported_memory_layouts():
    x = torch.randn(6, 8)
    for bad in (x.T, x[:, ::2], x[:, :4]):
        with pytest.raises(UserError, match="must be contiguous"):
            check_rows(bad)
    check_strided(x[:, :4])
    for bad in (x.T, x[:, ::2]):
        with pytest.raises(UserError, match="must be contiguous in memory"):
            check_strided(bad)
    for parts in ([], [x] * 4, [x, x[:, :4]], [x[:, :4]]):
        with pytest.raises(UserError, match="as wide as the gate"):
            check_parts(parts, x)


def test_layer_operators_pass_opcheck():
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(4, 8)
        out, mean, _ = torch.ops.nestrec.norm_rows(x, torch.bfloat16, True, 1e-6, None, 0, 0, 1.0)
        assert (out.shape, out.dtype, mean.shape) == (x.shape, torch.bfloat16, (4,))
        torch.ops.nestrec.gate_rows_backward(x, [x], x, mean, mean, x, [x], None, True, None, 0, 0, 1.0)
    assert norm_rows.__doc__
