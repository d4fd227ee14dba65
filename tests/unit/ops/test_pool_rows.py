import pytest
import torch

from nestrec.jagged import offsets_of
from nestrec.ops.rows.pool import pool_rows, pool_rows_reference


@pytest.mark.parametrize("lengths", [[], [0], [3, 0, 5, 1], [40] * 200])
def test_fused_sums_and_gradients_are_the_reference(lengths):
    torch.manual_seed(0)
    lengths = torch.tensor(lengths, dtype=torch.int64)
    rows = [torch.randn(17, 6, dtype=torch.float64).requires_grad_() for _ in range(2)]
    rows[1].data.copy_(rows[0].data)
    index = torch.randint(0, 17, (int(lengths.sum()),), dtype=torch.int32)
    outs = [f(r, index, offsets_of(lengths)) for f, r in zip((pool_rows, pool_rows_reference), rows, strict=True)]
    torch.testing.assert_close(*outs, rtol=1e-13, atol=1e-13)
    grad = torch.randn_like(outs[0])
    for out in outs:
        out.backward(grad)
    assert torch.equal(rows[0].grad, rows[1].grad)
