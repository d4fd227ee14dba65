"""Kernels on rows against their definitions. Under TRITON_INTERPRET=1 the same tests run on a CPU."""

import pytest
import torch

from nestrec.ops.move_rows import move_rows, move_rows_reference
from nestrec.ops.registry import IS_INTERPRETED

pytestmark = pytest.mark.gpu
DEVICE = "cpu" if IS_INTERPRETED else "cuda"


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("given", ["gather", "scatter", "both", "neither"])
@pytest.mark.parametrize("width", [1, 3, 37, 128, 132])
def test_rows_move_as_defined_and_others_stay(width, given, index_dtype):
    torch.manual_seed(width)
    source = words(300, width + width % 4)[:, :width]
    places = torch.randint(-1, 300, (200,), device=DEVICE, dtype=index_dtype)
    targets = torch.randperm(310, device=DEVICE)[:200].to(index_dtype)
    targets[7] = -1
    index = (places if given in ("gather", "both") else None, targets if given in ("scatter", "both") else None)
    found, expected = (torch.full((310, width), 7, dtype=torch.int32, device=DEVICE) for _ in range(2))
    move_rows(source, found, *index)
    move_rows_reference(source, expected, *index)
    assert torch.equal(found, expected)


def test_no_rows_move_nothing():
    target = words(5, 4)
    before = target.clone()
    move_rows(words(3, 4), target, torch.empty(0, dtype=torch.int64, device=DEVICE))
    assert torch.equal(target, before)
