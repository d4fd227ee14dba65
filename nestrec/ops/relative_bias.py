"""Relative position and time bias of HSTU.

    bias[b, i, j] = position[j - i + N - 1] + time[bucket(query_time[b, i] - time[b, j])]
    bucket(dt)    = min(floor(ln(max(|dt|, 1)) / 0.301), num_buckets)          dt in seconds

Legend: B sequences, N padded length.
"""

import torch


def time_bucket(delta_s: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """Bucket of a time difference in seconds; the published recipe takes natural logarithms over 0.301."""
    return (delta_s.abs().clamp(min=1.0).log() / 0.301).floor().to(torch.int64).clamp(max=num_buckets)


class _TableValues(torch.autograd.Function):
    """`table[index]`, whose backward is one histogram instead of an addition for each element."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.table_size = table.numel()  # type: ignore[attr-defined]
        return table[index]

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors  # type: ignore[attr-defined]
        size: int = ctx.table_size  # type: ignore[attr-defined]
        weights = grads[0].reshape(-1)
        return torch.bincount(index.reshape(-1), weights=weights, minlength=size).to(weights.dtype), None


def table_values(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Values of a small one-dimensional table at `index` (any shape)."""
    return _TableValues.apply(table, index)  # type: ignore[no-any-return]


def position_bias(table: torch.Tensor, length: int) -> torch.Tensor:
    """(N, N) bias of the distance between query i and key j; `table` holds 2 * max_length - 1 values."""
    positions = torch.arange(length, device=table.device)
    return table_values(table, positions[None, :] - positions[:, None] + (table.numel() - 1) // 2)


def time_bias(table: torch.Tensor, query_time_BN: torch.Tensor, time_BN: torch.Tensor) -> torch.Tensor:
    """(B, N, N) bias of the time between query i and key j; times in seconds, `table` holds num_buckets + 1 values."""
    return table_values(table, time_bucket(query_time_BN[:, :, None] - time_BN[:, None, :], table.numel() - 1))
