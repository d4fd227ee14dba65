import re
from pathlib import Path

import torch

import nestrec
from nestrec.base.cuda import on_stream, pinned_empty, pinned_like, side_stream, to_host

CPU = torch.device("cpu")


def test_host_copy_of_a_host_tensor_is_the_tensor():
    tensor = torch.arange(3)
    copy = to_host(tensor)
    assert copy.arrived is None
    assert copy.wait() is tensor


def test_pinned_tensors_of_a_cpu_are_plain_memory():
    empty = pinned_empty([2, 3], torch.int16, CPU)
    assert (empty.shape, empty.dtype, empty.device, empty.is_pinned()) == ((2, 3), torch.int16, CPU, False)
    like = pinned_like(empty)
    assert (like.shape, like.dtype, like.data_ptr() == empty.data_ptr()) == ((2, 3), torch.int16, False)


def test_side_stream_of_a_cpu_changes_nothing():
    assert side_stream(CPU, is_urgent=True) is None
    with on_stream(side_stream(CPU)):
        assert torch.ones(2).sum() == 2


def test_pinned_memory_and_streams_are_created_in_one_module():
    folder = Path(nestrec.__file__).parent
    found = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if re.search(r"pin_memory\b|cuda\.Stream\(", path.read_text())
    }
    assert found == {"base/cuda.py"}
