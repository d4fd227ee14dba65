"""Embedding lookup (gather) and pooling (embedding bags), with deterministic gradients.

`gather_rows` gathers rows by index:

    forward    out[p] = rows[index[p]]
    backward   d rows[u] = sum of d out[p] over all p with index[p] = u, in the order of `row_sum`

torch's own index_select adds gradients in an order that depends on threads (CPU) or on atomics (CUDA), so two runs can
differ; here results are bitwise reproducible.

`HalfPrecisionRows` are 16-bit rows with float32 gradients. In autograd a gradient has the dtype of its tensor, so
16-bit rows would get rounded gradients, and a float32 leaf would be a copy of all rows, twice their size. Therefore the
leaf is an anchor: a float32 tensor with the shape of the rows that occupies a single element in memory. Operators that
support `HalfPrecisionRows` read the values and return their gradient to the anchor.

`pool_rows` sums rows by segment (bag): lookup and sum in one pass, without the looked-up rows in memory.

    forward    out[b] = sum of w[p] rows[index[p]] over the positions p of segment b, in order of p
    backward   d rows[u] = sum of w[p] d out[segment of p] over all p with index[p] = u, in the order of `row_sum`

w is 1 if there are no weights. A mean is the sum divided by the number of positions of the segment, and 0 for an empty
segment.

Shapes: U rows, D elements of a row, P positions (of any shape in `gather_rows`), B segments with B + 1 offsets.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.base.thread_team import parallel_for
from nestrec.ops.embedding.row_copy import move_rows
from nestrec.ops.embedding.row_sum import sum_by_index, sum_by_runs
from nestrec.ops.kernel_op import kernel_op, runs_triton


@dataclass(frozen=True, slots=True)
class HalfPrecisionRows:
    """16-bit rows whose gradients, and results computed from them, are float32."""

    values: torch.Tensor
    """(U, D) stored 16-bit rows."""
    anchor: torch.Tensor
    """(U, D) float32 leaf that receives the gradient; its values are not used."""

    @staticmethod
    def of(values: torch.Tensor) -> "HalfPrecisionRows":
        """Wrap 16-bit rows with a new anchor that requires a gradient."""
        anchor = torch.zeros((), dtype=torch.float32, device=values.device).expand(values.shape)
        return HalfPrecisionRows(values.detach(), anchor.detach().requires_grad_())

    def to_float32(self) -> torch.Tensor:
        """Return all rows as float32, for operators other than `gather_rows` and `unit_rows`. Differentiable."""
        return _ToFloat32.apply(self.anchor, self.values)  # type: ignore[no-any-return]


TableRows = torch.Tensor | HalfPrecisionRows
"""Deduplicated rows of a table, of any floating-point dtype or as `HalfPrecisionRows`."""


def leaf_and_values(rows: TableRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensor that gets the gradient and the tensor to read: anchor and values, or the same tensor twice."""
    return (rows.anchor, rows.values) if isinstance(rows, HalfPrecisionRows) else (rows, rows)


class _ToFloat32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.float()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


_WORD_BYTES = 4


def gather_rows(rows_UD: TableRows, index_P: torch.Tensor) -> torch.Tensor:
    """Return rows_UD[index_P] of shape (*index_P.shape, D); the gradient is summed in a fixed order."""
    if isinstance(rows_UD, HalfPrecisionRows):
        return _GatherRows.apply(rows_UD.anchor, index_P, rows_UD.values)  # type: ignore[no-any-return]
    return _GatherRows.apply(rows_UD, index_P, None)  # type: ignore[no-any-return]


def gather_unique_rows(rows_UD: torch.Tensor, index_P: torch.Tensor) -> torch.Tensor:
    """Gather rows by unique indices: like `gather_rows`, but the gradient is a copy instead of a sum.

    A negative index returns the first row and contributes no gradient.
    """
    return _DealRows.apply(rows_UD, index_P)  # type: ignore[no-any-return]


def _fake(rows_UD: torch.Tensor, index_P: torch.Tensor) -> torch.Tensor:
    return rows_UD.new_empty(index_P.shape[0], rows_UD.shape[1])


@kernel_op("take_rows", fake=_fake)
def take_rows(rows_UD: torch.Tensor, index_P: torch.Tensor) -> torch.Tensor:
    """Return rows_UD[index_P] of shape (P, D) for int32 or int64 indices, without a gradient; rows may be strided."""
    if not runs_triton(rows_UD) or not _has_words(rows_UD):
        return rows_UD.index_select(0, index_P)
    out_PD = rows_UD.new_empty(len(index_P), rows_UD.shape[1])
    move_rows(rows_UD.view(torch.int32), out_PD.view(torch.int32), index_P.contiguous())
    return out_PD


def _has_words(rows_UD: torch.Tensor) -> bool:
    """Return whether each row consists of complete int32 words; 16-bit rows of odd length do not."""
    size = rows_UD.element_size()
    (stride, unit) = rows_UD.stride()
    sizes = size * rows_UD.shape[1], size * stride, size * rows_UD.storage_offset()
    return unit == 1 and rows_UD.shape[1] > 0 and all(b % _WORD_BYTES == 0 for b in sizes)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_UD: torch.Tensor, index_P: torch.Tensor, stored_UD: torch.Tensor | None) -> torch.Tensor:
        """Gather rows; stored_UD: the values if `rows_UD` is the anchor of `HalfPrecisionRows`, otherwise None."""
        ctx.save_for_backward(index_P)
        ctx.num_rows = rows_UD.shape[0]
        ctx.dtype = rows_UD.dtype
        read_UD = rows_UD if stored_UD is None else stored_UD
        taken_PD = take_rows(read_UD, index_P.reshape(-1)).to(rows_UD.dtype)
        return taken_PD.view(*index_P.shape, rows_UD.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (index_P,) = ctx.saved_tensors
        grad_PD = grads[0].reshape(-1, grads[0].shape[-1])
        return sum_by_index(grad_PD, index_P.reshape(-1), ctx.num_rows).to(ctx.dtype), None, None


class _DealRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_UD: torch.Tensor, index_P: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index_P)
        ctx.num_rows = rows_UD.shape[0]
        return take_rows(rows_UD, index_P.clamp(min=0).reshape(-1)).view(*index_P.shape, rows_UD.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        index_P = ctx.saved_tensors[0].reshape(-1)
        grad_PD = grads[0].reshape(-1, grads[0].shape[-1])
        out_UD = grad_PD.new_zeros(ctx.num_rows, grad_PD.shape[1])
        if _has_words(grad_PD):
            move_rows(grad_PD.view(torch.int32), out_UD.view(torch.int32), None, index_P)
        else:
            is_valid = index_P >= 0
            out_UD[index_P[is_valid]] = grad_PD[is_valid]
        return out_UD, None


Pooling = Literal["sum", "mean", "weighted"]
"""Pooling mode of a bag; `weighted` is the sum of rows times the per-sample weights of their keys."""


def pool_bags(
    rows_UD: TableRows, index_P: torch.Tensor, offsets: torch.Tensor, how: Pooling, weight_P: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the (B, D) pooled vectors of bags.

    Args:
        rows_UD: Deduplicated rows.
        index_P: Row of each position.
        offsets: (B + 1,) start of each bag.
        how: Pooling mode.
        weight_P: Weight of each position; used by `weighted` only.
    """
    float_UD = rows_UD.to_float32() if isinstance(rows_UD, HalfPrecisionRows) else rows_UD
    pooled_BD = pool_rows(float_UD, index_P, offsets, weight_P if how == "weighted" else None)
    return pooled_BD / offsets.diff().clamp(min=1)[:, None] if how == "mean" else pooled_BD


def pool_rows(
    rows_UD: torch.Tensor, index_P: torch.Tensor, offsets: torch.Tensor, weight_P: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum looked-up rows over segments, like `nn.EmbeddingBag`; for custom tasks.

    Fused for float32 and float64 on a CPU; otherwise computed by `pool_rows_reference`.

    Args:
        rows_UD: (U, D) unique rows.
        index_P: (P,) row of each position.
        offsets: (B + 1,) start of each segment.
        weight_P: (P,) weight of each position (`per_sample_weights`); gets no gradient.

    Returns:
        (B, D) sums of `rows_UD[index_P]` over the segments.

    Example:
        >>> rows = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> pool_rows(rows, torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3]))
        tensor([[1., 1.],
                [0., 1.]])
    """
    if rows_UD.device.type == "cpu" and rows_UD.dtype in (torch.float32, torch.float64):
        return _PoolRows.apply(rows_UD, index_P, offsets, weight_P)  # type: ignore[no-any-return]
    return pool_rows_reference(rows_UD, index_P, offsets, weight_P)


def pool_rows_reference(
    rows_UD: torch.Tensor, index_P: torch.Tensor, offsets: torch.Tensor, weight_P: torch.Tensor | None = None
) -> torch.Tensor:
    """Reference implementation of `pool_rows`: gathers the rows, then sums them."""
    looked_up_PD = gather_rows(rows_UD, index_P)
    if weight_P is not None:
        looked_up_PD = looked_up_PD * weight_P.to(looked_up_PD.dtype)[:, None]
    return torch.segment_reduce(looked_up_PD, "sum", lengths=offsets.diff(), unsafe=True, initial=0.0)


@njit(cache=True, nogil=True)
def _pool(rows, index, offsets, weight, out, low, high):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    for b in range(low, high):
        for p in range(offsets[b], offsets[b + 1]):
            row = index[p]
            for j in range(rows.shape[1]):
                out[b, j] += rows[row, j] * weight[p] if len(weight) else rows[row, j]


@njit(cache=True, nogil=True)
def _scatter_gradients(offsets, grad, weight, out, index, low, high):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    for b in range(len(offsets) - 1):
        for p in range(offsets[b], offsets[b + 1]):
            row = index[p]
            if low <= row < high:
                for j in range(grad.shape[1]):
                    out[row, j] += grad[b, j] * weight[p] if len(weight) else grad[b, j]


class _PoolRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_UD: torch.Tensor,
        index_P: torch.Tensor,
        offsets: torch.Tensor,
        weight_P: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(index_P, offsets)
        ctx.num_rows = len(rows_UD)
        ctx.weight = _weights(weight_P, rows_UD.dtype)
        out_BD = rows_UD.new_zeros(len(offsets) - 1, rows_UD.shape[1])
        rows, index, bounds = (t.detach().contiguous().numpy() for t in (rows_UD, index_P, offsets))
        out = out_BD.numpy()
        parallel_for(len(out), len(index), lambda low, high: _pool(rows, index, bounds, ctx.weight, out, low, high))
        return out_BD

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        index_P, offsets = ctx.saved_tensors
        grad_BD = grads[0].contiguous()
        index, bounds, grad = (t.contiguous().numpy() for t in (index_P, offsets, grad_BD))
        summed = sum_by_runs(index, ctx.num_rows, grad_BD, partial(_scatter_gradients, bounds, grad, ctx.weight))
        return summed, None, None, None


def _weights(weight_P: torch.Tensor | None, dtype: torch.dtype) -> NDArray[Any]:
    """Return the weights in the dtype of the rows; an empty array if there are none."""
    weights = torch.zeros(0, dtype=dtype) if weight_P is None else weight_P.detach().to(dtype)
    return np.ascontiguousarray(weights.numpy())
