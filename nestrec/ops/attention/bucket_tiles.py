"""Time buckets of all pairs of a batch, a byte each, for kernels that would look at a pair once a head and pass.

Pairs lie in tiles of 64 x 64, those at or before the diagonal or, where a contextual prefix looks ahead, all of them.
Within a tile a byte lies where the threads of a matrix instruction want it: thread 32 w + 4 r + c of 128 owns 32
bytes, byte 4 k + 2 h + e of which is row 16 w + 8 h + r, column 8 k + 2 c + e.

Legend: T tokens, B sequences.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0917

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nestrec.ops.attention.relative_bias import RelativeBias, bucket_edges
from nestrec.ops.attention.time_buckets import time_bucket
from nestrec.ops.attention.work_order import make_schedule

SIDE = 64
"""rows and columns of a tile"""
LARGEST_BUCKET = 255
MAX_BYTES = 8 << 30
"""of the tiles of a batch; larger ones are for kernels that find buckets themselves"""
SPLITS = 8
"""programs that share a row of tiles"""


class BucketTiles(NamedTuple):
    """Of a batch; the first tile of a sequence is `first_B`, behind it its rows of tiles from the first on."""

    tiles: torch.Tensor
    """int32 words of four bytes"""
    first_B: torch.Tensor


def most_tiles(num_tokens: int, num_sequences: int, max_length: int, *, is_square: bool) -> int:
    """That sequences of at most `max_length` tokens can have, and some that are read behind the diagonal."""
    longest = -(-max_length // SIDE)
    rows = num_tokens // SIDE + num_sequences
    return (rows * longest if is_square else rows * (longest + 1) // 2) + 4


def fits(bias: RelativeBias, offsets: torch.Tensor, max_length: int, *, is_square: bool) -> bool:
    """Whether buckets are bytes, and not too many."""
    assert bias.time_table is not None
    assert bias.time_T is not None
    tiles = most_tiles(bias.time_T.numel(), offsets.numel() - 1, max_length, is_square=is_square)
    return bias.time_table.numel() <= LARGEST_BUCKET + 1 and tiles * SIDE * SIDE <= MAX_BYTES


def empty_tiles(bias: RelativeBias, offsets: torch.Tensor, max_length: int, *, is_square: bool) -> BucketTiles:
    """Memory for the buckets of a batch, and where each sequence's lie; without waiting for the device."""
    assert bias.time_T is not None
    count = most_tiles(bias.time_T.numel(), offsets.numel() - 1, max_length, is_square=is_square)
    blocks_B = (offsets.diff() + SIDE - 1) // SIDE
    tiles_B = blocks_B * blocks_B if is_square else blocks_B * (blocks_B + 1) // 2
    first_B = (tiles_B.cumsum(0) - tiles_B).to(torch.int32)
    return BucketTiles(torch.empty(count * SIDE * SIDE // 4, dtype=torch.int32, device=offsets.device), first_B)


def fill_tiles(
    where: BucketTiles, bias: RelativeBias, offsets: torch.Tensor, *, is_square: bool, is_reversed: bool
) -> None:
    """Rows of a tile are queries, or keys where it is reversed."""
    assert bias.time_table is not None
    assert bias.time_T is not None
    num_buckets = bias.time_table.numel() - 1
    schedule = make_schedule(offsets, bias.time_T.numel(), SIDE)
    _tiles_kernel[schedule.table.shape[0], SPLITS](
        where.tiles.view(torch.uint8), *schedule, where.first_B, bias.query_time_T, bias.time_T,
        bucket_edges(num_buckets, offsets.device), num_buckets, where.tiles.numel() * 4 // (SIDE * SIDE), SPLITS,
        IS_SQUARE=is_square, REVERSED=is_reversed, SIDE=SIDE, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_buckets", "num_tiles"])
def _tiles_kernel(out, schedule, state, first_tile, query_time, key_time, edges, num_buckets, num_tiles, num_splits,
                  IS_SQUARE: tl.constexpr, REVERSED: tl.constexpr, SIDE: tl.constexpr):  # fmt: skip
    item = tl.program_id(0)
    if item >= tl.load(state):
        return
    entry = schedule + 4 * item
    start, length, before, b = tl.load(entry).to(tl.int64), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    block = item - before
    n = tl.arange(0, SIDE * SIDE)
    row = n // 1024 * 16 + n // 2 % 2 * 8 + n // 128 % 8
    column = n // 4 % 8 * 8 + n // 32 % 4 * 2 + n % 2
    if REVERSED:
        asks, sees = column, row
    else:
        asks, sees = row, column
    i = block * SIDE + asks
    asked = tl.load(query_time + start + i, mask=i < length, other=0.0)
    first = tl.load(first_tile + b)
    blocks = (length + SIDE - 1) // SIDE
    if IS_SQUARE:
        first += block * blocks
        end = blocks
    else:
        first += block * (block + 1) // 2
        end = block + 1
    for other in range(tl.program_id(1), end, num_splits):
        j = other * SIDE + sees
        delta = asked - tl.load(key_time + start + j, mask=j < length, other=0.0)
        place = out + (first + other).to(tl.int64) * (SIDE * SIDE) + n
        tl.store(place, time_bucket(delta, edges, num_buckets).to(tl.uint8), mask=first + other < num_tiles)
