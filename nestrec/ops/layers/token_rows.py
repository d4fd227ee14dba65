"""Input vectors of the tokens of a serving batch, computed from its event and candidate records in one GPU kernel.

    x[t] = factor * (content of the record  or  sum of the vectors of its action bits) + position

Legend: T tokens (rows), R records, B action bits, D model width.
"""

import torch
import triton
import triton.language as tl

from nestrec.ops.layers.row_ops import part_grid, part_tile


@triton.jit
def _token_rows_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    content,
    actions,
    vectors,
    position,
    tokens,
    positions,
    out,
    num_rows,
    factor,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    is_channel = channel < WIDTH
    is_here = is_row[:, None] & is_channel[None, :]
    token = tl.load(tokens + row, mask=is_row, other=0).to(tl.int64)
    position_row = tl.load(positions + row, mask=is_row, other=0).to(tl.int64)
    record = token >> 1
    is_content = (token & 1) == 0
    is_action = (token & 1) == 1
    own = content + record[:, None] * WIDTH + channel[None, :]
    x = tl.load(own, mask=is_here & is_content[:, None], other=0.0).to(tl.float32)
    bits = tl.load(actions + record, mask=is_row & is_action, other=0)
    for bit in tl.static_range(BITS):
        weight = tl.load(vectors + bit * WIDTH + channel, mask=is_channel, other=0.0).to(tl.float32)
        x += tl.where(((bits >> bit) & 1 == 1)[:, None], weight[None, :], 0.0)
    moved = tl.load(position + position_row[:, None] * WIDTH + channel[None, :], mask=is_here, other=0.0).to(tl.float32)
    x = x * factor + moved
    tl.store(out + row[:, None].to(tl.int64) * WIDTH + channel[None, :], x.to(out.dtype.element_ty), mask=is_here)


def token_rows(  # noqa: PLR0917
    content_RD: torch.Tensor,
    action_R: torch.Tensor,
    vector_BD: torch.Tensor,
    position_PD: torch.Tensor,
    token_T: torch.Tensor,
    position_T: torch.Tensor,
    *,
    factor: float,
) -> torch.Tensor:
    """Return the (T, D) input vectors of tokens.

    Args:
        content_RD: Content vector of each record.
        action_R: Action bits of each record, int32.
        vector_BD: Vector of each action bit.
        position_PD: Position embeddings.
        token_T: Twice the record of each token, plus 1 for the action token of an event.
        position_T: Position of each token.
        factor: Scale of the vectors before the position is added.
    """
    out = content_RD.new_empty(len(token_T), content_RD.shape[1])
    _token_rows_kernel[part_grid(out)](
        content_RD,
        action_R,
        vector_BD,
        position_PD,
        token_T,
        position_T,
        out,
        len(out),
        factor,
        BITS=len(vector_BD),
        **part_tile(out.shape[1]),
    )
    return out
