import pytest
import torch

from nestrec.jagged import offsets_of
from nestrec.ops.embedding.row_gather import pool_bags, pool_rows, pool_rows_reference


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("lengths", [[], [0], [3, 0, 5, 1], [40] * 200])
def test_pool_rows_and_gradients_equal_reference(lengths, is_weighted):
    torch.manual_seed(0)
    lengths = torch.tensor(lengths, dtype=torch.int64)
    rows = [torch.randn(17, 6, dtype=torch.float64).requires_grad_() for _ in range(2)]
    rows[1].data.copy_(rows[0].data)
    index = torch.randint(0, 17, (int(lengths.sum()),), dtype=torch.int32)
    weight = torch.rand(len(index)) if is_weighted else None
    functions = (pool_rows, pool_rows_reference)
    outs = [f(r, index, offsets_of(lengths), weight) for f, r in zip(functions, rows, strict=True)]
    torch.testing.assert_close(*outs, rtol=1e-13, atol=1e-13)
    grad = torch.randn_like(outs[0])
    for out in outs:
        out.backward(grad)
    assert torch.equal(rows[0].grad, rows[1].grad)


def test_pool_bags_equals_torch_embedding_bag():
    torch.manual_seed(0)
    rows = torch.randn(9, 4)
    index = torch.randint(0, 9, (11,))
    offsets = torch.tensor([0, 3, 3, 10, 11])
    weight = torch.rand(11)
    bag = torch.nn.functional.embedding_bag
    for method in ("sum", "mean"):
        expected = bag(index, rows, offsets, mode=method, include_last_offset=True)
        torch.testing.assert_close(pool_bags(rows, index, offsets, method, weight), expected)
    expected = bag(index, rows, offsets, mode="sum", include_last_offset=True, per_sample_weights=weight)
    torch.testing.assert_close(pool_bags(rows, index, offsets, "weighted", weight), expected)
