"""The variants of the sampled losses: the same numbers, at different prices.

variant     vectors of the negatives (T tokens x N candidates x D channels)
plain       all in the device's memory, until their gradients are there: the definition
segments    gathered again from the rows, some tokens at a time, forward and backward
fused       gathered inside the kernel, never stored (Triton; on a CPU very short segments)
offload     in host memory, fetched by segments with a double buffer
"""

from typing import Literal, get_args

import torch

from nestrec.ops.losses.candidates import LossCandidates
from nestrec.ops.losses.fused import fused_loss
from nestrec.ops.losses.segmented import segmented_loss
from nestrec.ops.losses.softmax import SampledKind, plain_sampled_loss
from nestrec.ops.rows.stored import StoredRows, TableRows

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
    """(T,) losses of tokens over their candidates. All variants but `plain` compute in the type of the rows, and read
    those of 16 bits as they are stored."""
    if variant == "plain":
        whole_UD = row_UD.whole() if isinstance(row_UD, StoredRows) else row_UD
        return plain_sampled_loss(query_TD, whole_UD, candidates, kind)
    with torch.autocast(query_TD.device.type, enabled=False):
        if variant == "fused":
            return fused_loss(query_TD, row_UD, candidates, kind)
        return segmented_loss(
            query_TD, row_UD, candidates, kind, segment_tokens=segment_tokens, offload=variant == "offload"
        )
