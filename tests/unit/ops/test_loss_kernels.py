"""Loss kernels without a GPU: shapes and dtypes of their operators under FakeTensorMode."""

import torch


def test_loss_operators_pass_opcheck():
    with torch._subclasses.FakeTensorMode():
        query, rows = torch.empty(5, 8, dtype=torch.bfloat16), torch.empty(20, 8, dtype=torch.bfloat16)
        index = torch.empty(5, 4, dtype=torch.int32)
        loss, total = torch.ops.nestrec.sampled_loss(query, rows, index, None, "bce")
        assert loss.shape == total.shape == (5,)
        assert loss.dtype == torch.float32
        grad, slope = torch.ops.nestrec.sampled_loss_backward(query, rows, index, None, total, loss, "bce")
        assert (grad.shape, slope.shape) == ((5, 8), (5, 4))
        assert torch.ops.nestrec.sum_outer(slope, query, index, 20).shape == (20, 8)
        assert torch.ops.nestrec.cross_entropy_slopes(slope, index[:, 0], total, loss) is None
        assert torch.ops.nestrec.cross_entropy_tile(slope, index[:, 0], total, loss, loss.clone()) is None
