"""Sampled losses whose candidate vectors are never all in the device's memory: fetched by segments of tokens, twice.

    forward    for each segment: vectors, logits, losses; kept is one number a token
    backward   for each segment: vectors and logits again, slopes, gradients of the queries; then those of the rows

`segments` gathers the vectors again from the deduplicated rows; `offload` keeps them in host memory (pinned on CUDA),
as TurboGR does, and brings them back with a double buffer. Without CUDA both are the same memory.

Legend: T tokens, S tokens of a segment, N candidates of a token, U rows, D channels.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from nestrec.ops.losses.candidates import LossCandidates, masked_logits
from nestrec.ops.losses.offloaded_vectors import OffloadedVectors
from nestrec.ops.losses.softmax import SampledKind, loss_of_logits, slopes
from nestrec.ops.losses.sum_outer import sum_outer
from nestrec.ops.rows.stored import TableRows, leaf_and_values

Segment = tuple[int, int, torch.Tensor]
"""First token, end, and (S, N, D) vectors, valid until the next segment is asked for."""


class Vectors(Protocol):
    """Vectors of all candidates, segment by segment."""

    def forward(self) -> Iterator[Segment]:
        """The first time."""

    def backward(self) -> Iterator[Segment]:
        """Again."""


class GatheredVectors:
    """Gathered by index whenever they are needed."""

    def __init__(self, row_UD: torch.Tensor, index_TN: torch.Tensor, segment_tokens: int) -> None:
        self._row_UD, self._index_TN, self._segment_tokens = row_UD, index_TN, segment_tokens

    def forward(self) -> Iterator[Segment]:
        for start, stop in segments(len(self._index_TN), self._segment_tokens):
            yield start, stop, gathered(self._row_UD, self._index_TN[start:stop])

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
    """(T,) losses."""
    leaf_UD, value_UD = leaf_and_values(row_UD)
    query_TD = query_TD.to(torch.promote_types(leaf_UD.dtype, torch.float32))
    options = (kind, segment_tokens, offload)
    return _Segmented.apply(  # type: ignore[no-any-return]
        query_TD, leaf_UD, value_UD.detach(), candidates.index_TN, candidates.bias_TN, options
    )


def segments(num_tokens: int, segment_tokens: int) -> Iterator[tuple[int, int]]:
    """Starts and ends."""
    for start in range(0, num_tokens, segment_tokens):
        yield start, min(start + segment_tokens, num_tokens)


def gathered(row_UD: torch.Tensor, index_SN: torch.Tensor) -> torch.Tensor:
    """(S, N, D) vectors."""
    return row_UD.index_select(0, index_SN.reshape(-1)).view(*index_SN.shape, row_UD.shape[1])


class _Segmented(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
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
            logit_SN = _logits(query_TD[start:stop], vector_SND, candidates.part(start, stop))
            loss_T[start:stop], total_T[start:stop] = loss_of_logits(logit_SN, kind)
        ctx.save_for_backward(query_TD, index_TN, total_T, *([] if bias_TN is None else [bias_TN]))
        ctx.vectors, ctx.kind, ctx.num_rows = vectors, kind, len(row_UD)
        return loss_T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_TD, index_TN, total_T, *bias = ctx.saved_tensors
        candidates = LossCandidates(index_TN, bias[0] if bias else None)
        grad_query_TD, slope_TN = torch.empty_like(query_TD), query_TD.new_empty(index_TN.shape)
        for start, stop, vector_SND in ctx.vectors.backward():
            logit_SN = _logits(query_TD[start:stop], vector_SND, candidates.part(start, stop))
            slope_SN = slopes(logit_SN, total_T[start:stop], ctx.kind) * grads[0][start:stop, None]
            grad_query_TD[start:stop] = torch.bmm(slope_SN[:, None], vector_SND.to(slope_SN.dtype))[:, 0]
            slope_TN[start:stop] = slope_SN
        ctx.vectors = None
        return grad_query_TD, sum_outer(slope_TN, query_TD, index_TN, ctx.num_rows), None, None, None, None


def _logits(query_SD: torch.Tensor, vector_SND: torch.Tensor, candidates: LossCandidates) -> torch.Tensor:
    return masked_logits(torch.bmm(vector_SND.to(query_SD.dtype), query_SD[:, :, None])[:, :, 0], candidates)
