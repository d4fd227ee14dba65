"""Work schedule of jagged attention: blocks of the longest sequences come first.

A work item is (sequence, head, block of rows). Item n belongs to the sequence of `table[n // heads]`. Items of the
same sequence and head are adjacent, so that programs that run at the same time share keys and values in the cache.
Programs take the next item from an atomic counter (dynamic load balancing), which evens out different lengths.

Legend: B sequences, H heads.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0917


COUNTERS = 7
"""Number of item counters of a schedule, one per kernel that uses it."""


class WorkOrder(NamedTuple):
    """Schedule of the work items of a batch, on the device."""

    table: torch.Tensor
    """One row per block: first token, length, first block and index of its sequence; (maximum blocks, 4) int32."""
    state: torch.Tensor
    """Number of blocks of all sequences, followed by one item counter per kernel, initially 0; int32."""


def make_schedule(
    offsets: torch.Tensor,
    num_tokens: int,
    block: int,
    first_tile_B: torch.Tensor | None = None,
    *,
    side: int = 64,
    is_square: bool = False,
) -> WorkOrder:
    """Build the schedule of a batch, sequences in descending order of length, without a device synchronization.

    Args:
        offsets: Bounds of the sequences, (B + 1,) int64.
        num_tokens: Number of tokens of all sequences.
        block: Number of rows per block.
        first_tile_B: Output of the same launch, int32: the first tile of each sequence; see `plan_tiles`.
        side: Number of rows and columns of a tile.
        is_square: Whether tiles above the diagonal are counted too.
    """
    num_sequences = offsets.numel() - 1
    table = torch.empty(max(num_tokens // block + num_sequences, 1), 4, dtype=torch.int32, device=offsets.device)
    state = torch.empty(1 + COUNTERS, dtype=torch.int32, device=offsets.device)
    _schedule_kernel[(max(num_sequences, 1),)](
        offsets,
        table,
        state,
        first_tile_B,
        num_sequences,
        BLOCK=block,
        SIDE=side,
        IS_SQUARE=is_square,
        CHUNK=1024,
        num_warps=4,
    )
    return WorkOrder(table, state)


@triton.jit(do_not_specialize=["num_sequences"])
def _schedule_kernel(
    offsets,
    table,
    state,
    first_tile,
    num_sequences,
    BLOCK: tl.constexpr,
    SIDE: tl.constexpr,
    IS_SQUARE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sort sequences, one program per sequence: after all longer ones and after equal ones with a smaller index."""
    b = tl.program_id(0)
    is_real = b < num_sequences
    start = tl.load(offsets + b).to(tl.int32)
    length = tl.load(offsets + b + 1, mask=is_real, other=0).to(tl.int32) - start
    before = 0
    total = 0
    tiles_before = 0
    for first in range(0, num_sequences, CHUNK):
        i = first + tl.arange(0, CHUNK)
        is_inside = i < num_sequences
        low = tl.load(offsets + i, mask=is_inside, other=0).to(tl.int32)
        high = tl.load(offsets + i + 1, mask=is_inside, other=0).to(tl.int32)
        blocks = (high - low + BLOCK - 1) // BLOCK
        is_before = (high - low > length) | ((high - low == length) & (i < b))
        before += tl.sum(tl.where(is_before & is_inside, blocks, 0))
        total += tl.sum(blocks)
        if first_tile is not None:
            sides = (high - low + SIDE - 1) // SIDE
            tiles = sides * sides if IS_SQUARE else sides * (sides + 1) // 2
            tiles_before += tl.sum(tl.where(i < b, tiles, 0))
    if b == 0:
        tl.store(state + tl.arange(0, 8), tl.where(tl.arange(0, 8) == 0, total, 0))
    if is_real:
        if first_tile is not None:
            tl.store(first_tile + b, tiles_before)
        blocks = (length + BLOCK - 1) // BLOCK
        for first in range(0, blocks, 64):
            i = first + tl.arange(0, 64)
            entry = table + 4 * (before + i)
            tl.store(entry, start, mask=i < blocks)
            tl.store(entry + 1, length, mask=i < blocks)
            tl.store(entry + 2, before, mask=i < blocks)
            tl.store(entry + 3, b, mask=i < blocks)
