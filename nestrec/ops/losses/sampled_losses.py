"""Sampled losses (sampled softmax, binary cross-entropy) over candidates of each token, in several variants.

`sampled_loss` computes the same values in each variant. The variants differ in where the vectors of the candidates
(T tokens x N candidates x D channels) are stored:

    variant     vectors of the candidates
    plain       all in device memory until backward: the reference implementation
    segments    gathered again from the rows in segments of tokens, in forward and in backward
    fused       gathered inside a Triton kernel, never stored (on a CPU: very short segments)
    offload     in host memory (host offload), copied back in segments with a double buffer

Fused: the kernel stores one value per token. A CPU uses segments that fit into its cache.

    forward    loss_t, and log-sum-exp_t for the backward pass
    backward   logits again, slopes (T, N); d query = slopes x rows, d rows by `sum_outer`

Segments and offload: the vectors of one segment of tokens at a time are in device memory. `segments` gathers them again
from the deduplicated rows. `offload` stores them in host memory (pinned on CUDA), as TurboGR does; without CUDA it is
the same memory.

    forward    per segment: vectors, logits, losses; one value per token is saved
    backward   per segment: vectors and logits again, slopes, gradients of the queries; then the gradients of the rows

Gradients of rows (`sum_outer`) are computed from the slopes of the logits, without a gradient vector per position:

    out[u] = sum of slope[t, n] * query[t] over all (t, n) with index[t, n] = u

in order of (t, n), by the runs of `nestrec.ops.embedding.row_sum`: an item that is a candidate of half a batch has a
hundred thousand positions, and one sequential chain of additions over them took longer than the model. The order is
fixed, so results are bitwise reproducible on each device.

Grouped (`grouped_loss`): the negatives of a token are the targets of the other tokens of its small group, and a group
is one matrix product:

    logit[t, s] = q[t] . row[target of s]                  t, s tokens of one group
    loss[t]     = loss of the candidates: own target first, then the targets of the other tokens of the group

A token has as many negatives as with other samplers, but a group reads its vectors once for all of its tokens. Samplers
that draw R separate negatives per token gather R + 1 times as many bytes.

Slopes are the gradients of the loss with respect to the logits.

Legend: T tokens, N candidates of a token, P = T * N positions, U rows, D channels; S tokens of a segment or of a group,
G groups.
"""

from collections.abc import Iterator
from typing import Any, Literal, Protocol, get_args

import torch
from numba import njit
from numpy.typing import NDArray
from torch.nn.functional import softplus

from nestrec.ops.embedding.row_gather import (
    HalfPrecisionRows,
    TableRows,
    gather_rows,
    gather_unique_rows,
    leaf_and_values,
)
from nestrec.ops.embedding.row_sum import sum_by_index_reference, sum_by_runs
from nestrec.ops.kernel_op import kernel_op, runs_triton
from nestrec.ops.losses.item_losses import (
    FALSE_NEGATIVE_LOGIT,
    LossCandidates,
    SampledKind,
    loss_of_logits,
    masked_logits,
    plain_sampled_loss,
    slopes,
)
from nestrec.ops.losses.offloaded_vectors import OffloadedVectors


def sum_outer_reference(
    slope_TN: torch.Tensor, query_TD: torch.Tensor, index_TN: torch.Tensor, num_rows: int
) -> torch.Tensor:
    """Reference implementation of `sum_outer`: computes a gradient vector for each position."""
    outer_PD = (slope_TN[:, :, None] * query_TD[:, None]).flatten(0, 1)
    return sum_by_index_reference(outer_PD, index_TN.flatten(), num_rows)


def sum_outer(slope_TN: torch.Tensor, query_TD: torch.Tensor, index_TN: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the (num_rows, D) gradients of the rows: sums of slope * query in the dtype of the slopes.

    Args:
        slope_TN: Gradients of the loss with respect to the logits, float32 or float64.
        query_TD: Query of each token.
        index_TN: Row index of each candidate.
        num_rows: Number of rows.
    """
    if runs_triton(slope_TN):
        return sum_outer_on_device(slope_TN, query_TD, index_TN, num_rows)
    wide_TD = query_TD.to(slope_TN.dtype).contiguous()
    slope = slope_TN.contiguous().numpy()
    query = wide_TD.numpy()
    index = index_TN.contiguous().numpy().reshape(-1)
    return sum_by_runs(index, num_rows, wide_TD, lambda out, rows, low, high: _add(out, rows, slope, query, low, high))


def _fake(slope: torch.Tensor, query: torch.Tensor, index: torch.Tensor, num_rows: int) -> torch.Tensor:
    return slope.new_empty(num_rows, query.shape[1])


@kernel_op("sum_outer", fake=_fake)
def sum_outer_on_device(slope: torch.Tensor, query: torch.Tensor, index: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Triton version of `sum_outer`: one program per run, which adds its positions in order, in small tiles."""
    from nestrec.ops.losses.sampled_kernels import sum_outer_kernel

    return sum_outer_kernel(slope, query, index, num_rows)


@njit(cache=True, nogil=True)
def _add(out: NDArray[Any], rows: NDArray[Any], slope: NDArray[Any], query: NDArray[Any], low: int, high: int) -> None:
    width = slope.shape[1]
    for t in range(slope.shape[0]):
        for n in range(width):
            row = rows[t * width + n]
            weight = slope[t, n]
            if low <= row < high and weight != 0.0:
                for d in range(query.shape[1]):
                    out[row, d] += weight * query[t, d]


Segment = tuple[int, int, torch.Tensor]
"""First token, end token (exclusive) and (S, N, D) vectors, which are valid until the next segment is requested."""


class Vectors(Protocol):
    """Source of the candidate vectors of all tokens, in segments."""

    def forward(self) -> Iterator[Segment]:
        """Yield the segments for the forward pass."""

    def backward(self) -> Iterator[Segment]:
        """Yield the same segments for the backward pass."""


class GatheredVectors:
    """Candidate vectors that are gathered from the rows in both passes."""

    def __init__(self, row_UD: torch.Tensor, index_TN: torch.Tensor, segment_tokens: int) -> None:
        self._row_UD = row_UD
        self._index_TN = index_TN
        self._segment_tokens = segment_tokens

    def forward(self) -> Iterator[Segment]:
        for start, stop in segments(len(self._index_TN), self._segment_tokens):
            yield start, stop, gather_candidates(self._row_UD, self._index_TN[start:stop])

    backward = forward


def segmented_loss(
    query_TD: torch.Tensor,
    row_UD: TableRows,
    candidates: LossCandidates,
    kind: SampledKind,
    *,
    segment_tokens: int,
    offload: bool = False,
) -> torch.Tensor:
    """Return the (T,) losses, computed in segments of tokens.

    Args:
        query_TD: Query of each token.
        row_UD: Deduplicated rows.
        candidates: Candidates of each token.
        kind: Sampled softmax or binary cross-entropy.
        segment_tokens: Number of tokens per segment.
        offload: Store the vectors in host memory for backward instead of gathering them again.
    """
    leaf_UD, value_UD = leaf_and_values(row_UD)
    query_TD = query_TD.to(torch.promote_types(leaf_UD.dtype, torch.float32))
    options = (kind, segment_tokens, offload)
    return _SegmentedLoss.apply(  # type: ignore[no-any-return]
        query_TD, leaf_UD, value_UD.detach(), candidates.index_TN, candidates.bias_TN, options
    )


def segments(num_tokens: int, segment_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end (exclusive) of each segment of tokens."""
    for start in range(0, num_tokens, segment_tokens):
        yield start, min(start + segment_tokens, num_tokens)


def gather_candidates(row_UD: torch.Tensor, index_SN: torch.Tensor) -> torch.Tensor:
    """Gather the (S, N, D) vectors of candidates."""
    return row_UD.index_select(0, index_SN.reshape(-1)).view(*index_SN.shape, row_UD.shape[1])


class _SegmentedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_TD: torch.Tensor,
        leaf_UD: torch.Tensor,
        row_UD: torch.Tensor,
        index_TN: torch.Tensor,
        bias_TN: torch.Tensor | None,
        options: tuple[SampledKind, int, bool],
    ) -> torch.Tensor:
        kind, segment_tokens, offload = options
        vectors: Vectors = (OffloadedVectors if offload else GatheredVectors)(row_UD, index_TN, segment_tokens)
        candidates = LossCandidates(index_TN, bias_TN)
        loss_T, total_T = query_TD.new_empty(len(query_TD)), query_TD.new_empty(len(query_TD))
        for start, stop, vector_SND in vectors.forward():
            logit_SN = _logits(query_TD[start:stop], vector_SND, candidates.slice_tokens(start, stop))
            loss_T[start:stop], total_T[start:stop] = loss_of_logits(logit_SN, kind)
        ctx.save_for_backward(query_TD, index_TN, total_T, *([] if bias_TN is None else [bias_TN]))
        ctx.vectors = vectors
        ctx.kind = kind
        ctx.num_rows = len(row_UD)
        return loss_T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_TD, index_TN, total_T, *bias = ctx.saved_tensors
        candidates = LossCandidates(index_TN, bias[0] if bias else None)
        grad_query_TD = torch.empty_like(query_TD)
        slope_TN = query_TD.new_empty(index_TN.shape)
        for start, stop, vector_SND in ctx.vectors.backward():
            logit_SN = _logits(query_TD[start:stop], vector_SND, candidates.slice_tokens(start, stop))
            slope_SN = slopes(logit_SN, total_T[start:stop], ctx.kind) * grads[0][start:stop, None]
            grad_query_TD[start:stop] = torch.bmm(slope_SN[:, None], vector_SND.to(slope_SN.dtype))[:, 0]
            slope_TN[start:stop] = slope_SN
        ctx.vectors = None
        return grad_query_TD, sum_outer(slope_TN, query_TD, index_TN, ctx.num_rows), None, None, None, None


def _logits(query_SD: torch.Tensor, vector_SND: torch.Tensor, candidates: LossCandidates) -> torch.Tensor:
    return masked_logits(torch.bmm(vector_SND.to(query_SD.dtype), query_SD[:, :, None])[:, :, 0], candidates)


# ruff: noqa: PLR0917 - torch operators have positional arguments


_CACHED_TOKENS = 16
"""Number of tokens per segment on a CPU, so that the vectors stay in its cache."""


def fused_loss(
    query_TD: torch.Tensor, row_UD: TableRows, candidates: LossCandidates, kind: SampledKind
) -> torch.Tensor:
    """Return the (T,) losses; a Triton kernel gathers the rows, so candidate vectors are never stored.

    Without Triton the loss is computed in short segments.
    """
    leaf_UD, value_UD = leaf_and_values(row_UD)
    if not runs_triton(value_UD):
        return segmented_loss(query_TD, row_UD, candidates, kind, segment_tokens=_CACHED_TOKENS)
    bias_TN = None if candidates.bias_TN is None else candidates.bias_TN.contiguous()
    return _FusedLoss.apply(  # type: ignore[no-any-return]
        query_TD.contiguous(), leaf_UD, value_UD.detach().contiguous(), candidates.index_TN.contiguous(), bias_TN, kind
    )


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_TD: torch.Tensor,
        leaf_UD: torch.Tensor,
        row_UD: torch.Tensor,
        index_TN: torch.Tensor,
        bias_TN: torch.Tensor | None,
        kind: SampledKind,
    ) -> torch.Tensor:
        loss_T, total_T = fused_forward(query_TD, row_UD, index_TN, bias_TN, kind)
        ctx.save_for_backward(query_TD, row_UD, index_TN, total_T, *([] if bias_TN is None else [bias_TN]))
        ctx.kind = kind
        return loss_T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_TD, row_UD, index_TN, total_T, *bias = ctx.saved_tensors
        grad_query_TD, slope_TN = fused_backward(
            query_TD, row_UD, index_TN, bias[0] if bias else None, total_T, grads[0].contiguous(), ctx.kind
        )
        return grad_query_TD, sum_outer(slope_TN, query_TD, index_TN, len(row_UD)), None, None, None, None


def _fake_forward(
    query: torch.Tensor, row: torch.Tensor, index: torch.Tensor, bias: torch.Tensor | None, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(row.dtype, torch.float32)
    return row.new_empty(len(index), dtype=wide), row.new_empty(len(index), dtype=wide)


@kernel_op("sampled_loss", fake=_fake_forward)
def fused_forward(
    query: torch.Tensor, row: torch.Tensor, index: torch.Tensor, bias: torch.Tensor | None, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (T,) losses and (T,) log-sum-exp of the tokens."""
    from nestrec.ops.losses.sampled_kernels import forward_kernel

    return forward_kernel(query, row, index, bias, kind)


def _fake_backward(
    query: torch.Tensor,
    row: torch.Tensor,
    index: torch.Tensor,
    bias: torch.Tensor | None,
    total: torch.Tensor,
    grad_loss: torch.Tensor,
    kind: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape, dtype=total.dtype), row.new_empty(index.shape, dtype=total.dtype)


@kernel_op("sampled_loss_backward", fake=_fake_backward)
def fused_backward(
    query: torch.Tensor,
    row: torch.Tensor,
    index: torch.Tensor,
    bias: torch.Tensor | None,
    total: torch.Tensor,
    grad_loss: torch.Tensor,
    kind: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (T, D) gradients of the queries and the (T, N) gradients of the logits."""
    from nestrec.ops.losses.sampled_kernels import backward_kernel

    return backward_kernel(query, row, index, bias, total, grad_loss, kind)


def grouped_loss(
    query_TD: torch.Tensor,
    row_UD: TableRows,
    positive_T: torch.Tensor,
    token_GS: torch.Tensor,
    kind: SampledKind,
    *,
    bias_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the (G, S) losses of tokens whose negatives are the targets of their group.

    Args:
        query_TD: Query of each token.
        row_UD: Deduplicated rows.
        positive_T: Row index of the target of each token.
        token_GS: Tokens of each group, padded with -1 at the end of a group; each token occurs once.
        kind: Sampled softmax or binary cross-entropy.
        bias_T: Value added to the logit of a token's target when it is a negative of another token (log-Q correction).

    Returns:
        (G, S) losses; 0 for padding.
    """
    flat = token_GS.clamp(min=0).flatten()
    index_GS = positive_T.index_select(0, flat).view(token_GS.shape)
    bias_GS = None if bias_T is None else bias_T.index_select(0, flat).view(token_GS.shape)
    q_GSD = gather_unique_rows(query_TD, token_GS)
    p_GSD = gather_rows(row_UD, index_GS)
    return _GroupedLoss.apply(  # type: ignore[no-any-return]
        q_GSD, p_GSD.to(q_GSD.dtype), index_GS, token_GS >= 0, bias_GS, kind
    )


class _GroupedLoss(torch.autograd.Function):
    """Loss of vectors gathered by group, with hand-written gradients: half as many passes as autograd would need."""

    @staticmethod
    def forward(
        ctx: Any,
        q_GSD: torch.Tensor,
        p_GSD: torch.Tensor,
        index_GS: torch.Tensor,
        is_token_GS: torch.Tensor,
        bias_GS: torch.Tensor | None,
        kind: SampledKind,
    ) -> torch.Tensor:
        logit_GSS = _products(q_GSD, p_GSD)
        own_GS = logit_GSS.diagonal(dim1=1, dim2=2)
        positive_GS = own_GS.clone()
        if bias_GS is not None:
            logit_GSS += bias_GS[:, None]
        logit_GSS.masked_fill_(index_GS[:, None, :] == index_GS[:, :, None], FALSE_NEGATIVE_LOGIT)
        own_GS.copy_(positive_GS)
        logit_GSS.masked_fill_(~is_token_GS[:, None, :], -torch.inf)
        if kind == "sampled_softmax":
            total_GS = torch.logsumexp(logit_GSS, dim=2)
            loss_GS = total_GS - positive_GS
            # All slopes of a padding token become 0, whatever its row of logits contains.
            total_GS.masked_fill_(~is_token_GS, torch.inf)
        else:
            total_GS = positive_GS
            plus_GSS = softplus(logit_GSS)
            plus_GSS.diagonal(dim1=1, dim2=2).copy_(softplus(-positive_GS))
            loss_GS = plus_GSS.sum(2)
        ctx.save_for_backward(q_GSD, p_GSD, logit_GSS, total_GS, is_token_GS)
        ctx.kind = kind
        return loss_GS.masked_fill_(~is_token_GS, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_GSD, p_GSD, logit_GSS, total_GS, is_token_GS = ctx.saved_tensors
        slope_GSS = (logit_GSS - total_GS[:, :, None]).exp_() if ctx.kind == "sampled_softmax" else logit_GSS.sigmoid()
        slope_GSS.diagonal(dim1=1, dim2=2).sub_(1.0)
        slope_GSS *= grads[0].masked_fill(~is_token_GS, 0.0)[:, :, None]
        slope_GSS = slope_GSS.to(q_GSD.dtype)
        return slope_GSS @ p_GSD, slope_GSS.mT @ q_GSD, None, None, None, None


def _products(q_GSD: torch.Tensor, p_GSD: torch.Tensor) -> torch.Tensor:
    """Multiply in the dtype of the vectors; sum and store in at least float32: logits near 20 need more than 8 bits."""
    if q_GSD.is_cuda and q_GSD.dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cuda", enabled=False):
            return torch.bmm(q_GSD, p_GSD.mT, out_dtype=torch.float32)
    wide = torch.promote_types(q_GSD.dtype, torch.float32)
    return q_GSD.to(wide) @ p_GSD.to(wide).mT


Variant = Literal["plain", "segments", "fused", "offload"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)


def sampled_loss(
    query_TD: torch.Tensor,
    row_UD: TableRows,
    candidates: LossCandidates,
    kind: SampledKind,
    *,
    variant: Variant = "plain",
    segment_tokens: int = 512,
) -> torch.Tensor:
    """Return the (T,) losses of tokens over their candidates.

    All variants except `plain` compute in the dtype of the rows (at least float32) and read 16-bit rows without
    converting them first.

    Args:
        query_TD: Query of each token.
        row_UD: Deduplicated rows.
        candidates: Candidates of each token.
        kind: Sampled softmax or binary cross-entropy.
        variant: Where the candidate vectors are stored; see the module docstring.
        segment_tokens: Number of tokens per segment for the variants `segments` and `offload`.
    """
    if variant == "plain":
        float_UD = row_UD.to_float32() if isinstance(row_UD, HalfPrecisionRows) else row_UD
        return plain_sampled_loss(query_TD, float_UD, candidates, kind)
    with torch.autocast(query_TD.device.type, enabled=False):
        if variant == "fused":
            return fused_loss(query_TD, row_UD, candidates, kind)
        return segmented_loss(
            query_TD, row_UD, candidates, kind, segment_tokens=segment_tokens, offload=variant == "offload"
        )
