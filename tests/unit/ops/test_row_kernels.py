"""Row kernels without a GPU: fallbacks, and operators under FakeTensorMode and torch.compile."""

from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

import nestrec.ops.embedding.dedup_keys
import nestrec.ops.embedding.row_update
from nestrec.ops.embedding.row_copy import move_rows
from nestrec.ops.embedding.row_gather import gather_rows, take_rows


def test_move_rows_skips_negative_indices():
    target = torch.zeros(3, 2, dtype=torch.int32)
    source = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    move_rows(source, target, torch.tensor([1, -1, 0]), torch.tensor([2, 0, -1]))
    assert target.tolist() == [[0, 0], [0, 0], [3, 4]]


def test_row_operators_pass_opcheck():
    with FakeTensorMode():
        rows = torch.empty(4, 8)
        index = torch.empty(9, dtype=torch.int32)
        ops = torch.ops.nestrec
        assert ops.take_rows(rows, index).shape == (9, 8)
        assert ops.sum_by_index(torch.empty(9, 8, dtype=torch.bfloat16), index, 4).shape == (4, 8)
        assert ops.sum_by_index(torch.empty(9, 8, dtype=torch.bfloat16), index, 4).dtype == torch.float32
        assert [found.shape[0] for found in ops.dedup_keys(index)] == [9, 10, 9, 9, 1]
        assert ops.move_rows(rows.view(torch.int32), rows.view(torch.int32), None, None) is None
        assert ops.update_rows(rows, [], rows, None, None, "sgd", [0.1] * 5) is None


def test_row_operator_records_no_gradient_in_eager_mode():
    rows = torch.randn(4, 8, requires_grad=True)
    assert not take_rows(rows, torch.tensor([1, 3])).requires_grad


def test_operators_are_created_only_in_kernel_op():
    """An operator that bypasses `kernel_op` would have a different overhead per call and different autograd rules."""
    makers = ("custom_op(", "torch.library.Library(", "torch.library.define(", "triton_op(", "register_autograd(")
    files = (Path(nestrec.__file__).parent / "ops").rglob("*.py")
    found = {path.name for path in files if any(maker in path.read_text() for maker in makers)}
    assert found == {"kernel_op.py"}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_row_gather_compiles_without_graph_breaks():
    torch.manual_seed(0)
    rows = torch.randn(6, 3, requires_grad=True)
    index = torch.randint(0, 6, (4, 5), dtype=torch.int32)
    compiled = torch.compile(lambda rows: gather_rows(rows, index).square().sum(), backend="aot_eager", fullgraph=True)
    compiled(rows).backward()
    found, rows.grad = rows.grad, None
    gather_rows(rows, index).square().sum().backward()
    torch.testing.assert_close(found, rows.grad, rtol=0, atol=0)
