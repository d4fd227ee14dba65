import pytest
import torch

from nestrec.ops.embedding.row_gather import gather_rows, gather_unique_rows
from nestrec.ops.embedding.row_sum import sum_by_index, sum_by_index_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0,), (1,), (40, 7), (3, 0, 2)])
def test_gather_rows_and_gradient_equal_reference(shape, dtype):
    torch.manual_seed(0)
    rows = torch.randn(13, 5, dtype=dtype, requires_grad=True)
    index = torch.randint(0, 13, shape, dtype=torch.int32)
    out = gather_rows(rows, index)
    assert torch.equal(out, rows[index.long()])
    grad = torch.randn_like(out)
    out.backward(grad)
    expected = sum_by_index_reference(grad.reshape(-1, 5), index.reshape(-1), 13)
    assert torch.equal(rows.grad, expected)


def test_sum_by_index_does_not_depend_on_threads():
    index = torch.randint(0, 100, (50_000,), dtype=torch.int32)
    grad = torch.randn(50_000, 16)
    before = torch.get_num_threads()
    sums = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        sums.append(sum_by_index(grad, index, 100))
    torch.set_num_threads(before)
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])


def test_add_by_index_in_parts_equals_one_sum_bitwise():
    from nestrec.ops.embedding.row_sum import add_by_index

    index = torch.randint(0, 9, (64,), dtype=torch.int32)
    grad = torch.randn(64, 3)
    out = torch.zeros(9, 3)
    for start in range(0, 64, 16):
        add_by_index(out, index[start : start + 16], grad[start : start + 16])
    assert torch.equal(out, sum_by_index_reference(grad, index, 9))


def test_gather_rows_bfloat16_gradients_use_float32_sums():
    rows = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True)
    gather_rows(rows, torch.zeros(1000, dtype=torch.int32)).float().sum().backward()
    assert rows.grad.tolist() == [[1000.0, 1000.0]]


def test_sum_by_index_of_popular_rows_uses_runs():
    torch.manual_seed(0)
    index = torch.cat([torch.zeros(700, dtype=torch.int32), torch.randint(0, 3, (900,), dtype=torch.int32)])
    grad = torch.randn(1600, 3)
    assert torch.equal(sum_by_index(grad, index, 4), sum_by_index_reference(grad, index, 4))
    first = torch.zeros(3)
    for run in grad[:512].split(256):
        total = torch.zeros(3)
        for value in run:
            total += value
        first += total
    assert torch.equal(sum_by_index(grad[:512], index[:512], 4)[0], first)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gather_unique_rows_and_gradient_equal_indexing(dtype):
    """Rows 2 and 5 are not gathered, and two positions have no row."""
    rows = torch.randn(7, 3, dtype=dtype, requires_grad=True)
    index = torch.tensor([[4, 0, 1, -1], [6, -1, 3, -1]], dtype=torch.int32)
    out = gather_unique_rows(rows, index)
    assert torch.equal(out, rows[index.clamp(min=0).long()])
    grad = torch.randn_like(out)
    out.backward(grad)
    expected = torch.zeros_like(rows)
    for position, row in enumerate(index.flatten().tolist()):
        if row >= 0:
            expected[row] = grad.view(-1, 3)[position]
    assert torch.equal(rows.grad, expected)
