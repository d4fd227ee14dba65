"""Pinned copies and side streams of `nestrec/base/cuda.py` on a GPU."""

import pytest
import torch

from nestrec.base.cuda import on_stream, pinned_empty, pinned_like, side_stream, to_host

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def test_host_copy_has_values_after_wait():
    tensor = torch.arange(1 << 20, device=CUDA)
    copy = to_host(tensor * 2)
    assert copy.host.is_pinned()
    assert torch.equal(copy.wait(), torch.arange(1 << 20) * 2)


def test_pinned_tensors_are_pinned_on_gpu():
    assert pinned_empty([4], torch.int64, CUDA).is_pinned()
    assert pinned_like(torch.ones(2, 3, device=CUDA)).shape == (2, 3)


def test_side_stream_is_current_in_context():
    before = torch.cuda.current_stream()
    urgent = side_stream(CUDA, is_urgent=True)
    assert urgent.priority == -1
    assert side_stream(CUDA).priority == 0
    with on_stream(urgent):
        assert torch.cuda.current_stream() == urgent
    assert torch.cuda.current_stream() == before
