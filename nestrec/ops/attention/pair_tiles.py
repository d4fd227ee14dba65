"""Pairs of tokens of a batch, in tiles: their time buckets, a byte each, and their biases, as products want them.

A tile is 64 queries by 64 keys. The tiles at or before the diagonal are kept or, where a contextual prefix looks
ahead, all of them, those of a sequence row by row. Buckets are found once a batch, and lie key by key. Biases are
written before a pass, two bytes a pair, and read by it once for every head: a word holds those of two neighbouring
columns, and the words of a tile lie where the threads of a matrix instruction want them.

    word 512 u + 4 (32 w + 4 r + c) + 2 k + h      is row 16 w + 8 h + r, columns 16 u + 8 k + 2 c and the next

Where biases are those of distances alone, words repeat: 8 rows and 8 columns of a matrix instruction have one for each
of 32 threads, and it is the same wherever their distance is. So there is a line of 32 words for every 8 tokens of
distance, and a thread needs 9 words of neighbouring lines for a tile instead of 16:

    word 4 r + c of a line m       is row less column 8 m + r - 2 c, and the next column's

A word of bfloat16 is read without taking it apart: moved by 16 bits it is the first value, and as it is the second,
whose own 16 bits are chosen with those behind them in mind. So both are within half a unit of bfloat16. Half of each
bias is kept, since SiLU begins with half of the score: adding it costs no instruction more.

Legend: T tokens, B sequences.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0917, RUF059

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from nestrec.ops.attention.mask_and_bias import RelativeBias, bucket_edges
from nestrec.ops.attention.time_triton import time_bucket, time_function
from nestrec.ops.attention.work_schedule import WorkOrder, make_schedule
from nestrec.ops.kernel_op import IS_INTERPRETED

SIDE = 64
"""rows and columns of a tile"""
WORDS = SIDE * SIDE // 2
"""of the biases of a tile"""
LANES, LINES = 32, 32
"""words of a line, where biases are those of distances alone, and lines that a program writes"""
LARGEST_BUCKET = 255
MAX_BYTES = 8 << 30
"""of the biases of a batch; larger ones are for kernels that find biases themselves"""
SPLITS = 8
"""programs that share a row of tiles"""


class TilePlan(NamedTuple):
    """Which tiles the sequences of a batch have."""

    first_B: torch.Tensor
    """int32, first tile of each sequence"""
    most: int
    """tiles that there can be, and some that are read behind the diagonal"""
    is_square: bool
    """whether those behind the diagonal are kept too"""


def most_tiles(num_tokens: int, num_sequences: int, max_length: int, *, is_square: bool) -> int:
    """That sequences of at most `max_length` tokens can have, and some that are read behind the diagonal."""
    longest = -(-max_length // SIDE)
    rows = num_tokens // SIDE + num_sequences
    return (rows * longest if is_square else rows * (longest + 1) // 2) + 4


def plan_tiles(
    offsets: torch.Tensor, num_tokens: int, max_length: int, *, is_square: bool, block: int = SIDE
) -> tuple[TilePlan, WorkOrder]:
    """And a schedule of blocks of `block` rows, by the same launch; without waiting for the device."""
    num_sequences = offsets.numel() - 1
    first_B = torch.empty(max(num_sequences, 1), dtype=torch.int32, device=offsets.device)
    schedule = make_schedule(offsets, num_tokens, block, first_B, side=SIDE, is_square=is_square)
    most = most_tiles(num_tokens, num_sequences, max_length, is_square=is_square)
    return TilePlan(first_B, most, is_square), schedule


def fits(bias: RelativeBias, offsets: torch.Tensor, num_tokens: int, max_length: int, *, is_square: bool) -> bool:
    """Whether buckets are bytes, and biases not too many."""
    tiles = most_tiles(num_tokens, offsets.numel() - 1, max_length, is_square=is_square)
    buckets = 0 if bias.time_table is None else bias.time_table.numel()
    return buckets <= LARGEST_BUCKET + 1 and tiles * SIDE * SIDE * 2 <= MAX_BYTES


def pair_buckets(
    time_T: torch.Tensor, query_time_T: torch.Tensor, offsets: torch.Tensor, plan: TilePlan, num_buckets: int
) -> torch.Tensor:
    """(tiles, keys, queries) uint8 time buckets of all pairs."""
    found = torch.empty(plan.most, SIDE, SIDE, dtype=torch.uint8, device=offsets.device)
    schedule = make_schedule(offsets, time_T.numel(), SIDE)
    _buckets_kernel[schedule.table.shape[0], SPLITS](
        found,
        *schedule,
        plan.first_B,
        query_time_T,
        time_T,
        bucket_edges(num_buckets, offsets.device),
        num_buckets,
        plan.most,
        SPLITS,
        IS_SQUARE=plan.is_square,
        SIDE=SIDE,
        num_warps=4,
    )
    return found


@triton.jit
def row_of_tiles(schedule, item, first_tile, IS_SQUARE: tl.constexpr, SIDE: tl.constexpr):
    """(first token, length, sequence, block of queries, its first tile, tiles)"""
    entry = schedule + 4 * item
    start, length, before, b = tl.load(entry).to(tl.int64), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    block = item - before
    blocks = (length + SIDE - 1) // SIDE
    if IS_SQUARE:
        first, count = block * blocks, blocks
    else:
        first, count = block * (block + 1) // 2, block + 1
    return start, length, b, block, tl.load(first_tile + b) + first, count


@triton.jit(do_not_specialize=["num_buckets", "num_tiles"])
def _buckets_kernel(
    out,
    schedule,
    state,
    first_tile,
    query_time,
    key_time,
    edges,
    num_buckets,
    num_tiles,
    num_splits,
    IS_SQUARE: tl.constexpr,
    SIDE: tl.constexpr,
):
    item = tl.program_id(0)
    if item >= tl.load(state):
        return
    start, length, _, block, first, count = row_of_tiles(schedule, item, first_tile, IS_SQUARE, SIDE)
    one = tl.arange(0, SIDE)
    i = block * SIDE + one
    asked = tl.load(query_time + start + i, mask=i < length, other=0.0)
    for other in range(tl.program_id(1), count, num_splits):
        j = other * SIDE + one
        seen_at = tl.load(key_time + start + j, mask=j < length, other=0.0)
        bucket = time_bucket(asked[None, :] - seen_at[:, None], edges, num_buckets)
        place = out + (first + other).to(tl.int64) * (SIDE * SIDE) + one[:, None] * SIDE + one[None, :]
        tl.store(place, bucket.to(tl.uint8), mask=first + other < num_tiles)


class BiasWords(NamedTuple):
    """Biases of the pairs of a batch, as a pass reads them."""

    words: torch.Tensor | None
    """int32, (tiles, words of a tile), or (lines, LANES); None without biases"""
    origin: int
    """-1: a tile for each tile of pairs. Otherwise lines by distance, that of the diagonal here"""


NO_WORDS = BiasWords(None, -1)


def needs_pairs(bias: RelativeBias, *, has_targets: bool) -> bool:
    """Whether biases differ between tiles of one distance."""
    return bias.has_time or (bias.position_table is not None and has_targets)


def write_bias(
    bias: RelativeBias,
    buckets: torch.Tensor | None,
    offsets: torch.Tensor,
    num_tokens: int,
    max_length: int,
    plan: TilePlan | None,
    targets_B: torch.Tensor | None,
    *,
    is_square: bool,
    is_reversed: bool,
    dtype: torch.dtype,
) -> BiasWords:
    """Rows of a tile are queries, or keys where it is reversed; dtype: of the products that read it.

    plan: None where biases are those of distances alone.
    """
    position = bias.position_table
    shared: dict[str, Any] = {"REVERSED": is_reversed, "IS_BF16": dtype == torch.bfloat16, "num_warps": 4}
    centre = 0 if position is None else (position.numel() - 1) // 2
    if plan is None:
        assert position is not None
        origin = -(-max_length // 8) + 4 * (SIDE // 8)
        words = torch.empty(2 * origin + 1, LANES, dtype=torch.int32, device=offsets.device)
        _distances_kernel[(-(-len(words) // LINES),)](
            words, position, centre, origin, len(words), LINES=LINES, **shared
        )
        return BiasWords(words, origin)
    words = torch.empty(plan.most, WORDS, dtype=torch.int32, device=offsets.device)
    schedule = make_schedule(offsets, num_tokens, SIDE)
    _words_kernel[schedule.table.shape[0], SPLITS](
        words,
        *schedule,
        plan.first_B,
        buckets,
        bias.time_table,
        bias.time_function,
        bias.query_time_T,
        bias.time_T,
        position,
        centre,
        targets_B,
        plan.most,
        SPLITS,
        IS_SQUARE=is_square,
        SIDE=SIDE,
        FAST=not IS_INTERPRETED,
        **shared,
    )
    return BiasWords(words, -1)


@triton.jit
def _bits(value, IS_BF16: tl.constexpr):
    """The 16 bits of a value, rounded to nearest."""
    if IS_BF16:
        bits = value.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    else:
        return value.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _words(even, odd, IS_BF16: tl.constexpr):
    """Two neighbours, halved."""
    odd *= 0.5
    low = _bits(0.5 * even, IS_BF16)
    if IS_BF16:
        bits = odd.to(tl.int32, bitcast=True)
        high = tl.maximum((bits & 0x7FFFFFFF) - low + 0x8000, 0) >> 16
        high = high | ((bits >> 16) & 0x8000)
    else:
        high = _bits(odd, IS_BF16)
    return (high << 16) | low


@triton.jit
def _store_words(place, value, IS_BF16: tl.constexpr, SIDE: tl.constexpr):
    """A tile of values, halved, as the head of this file lays it out."""
    even, odd = tl.split(value.reshape([SIDE, SIDE // 2, 2]))
    words = _words(even, odd, IS_BF16)
    # rows (w, h, r) and columns (u, k, c) to (u, w, r, c, k, h)
    ordered = words.reshape([4, 2, 8, 4, 2, 4]).permute((3, 0, 2, 5, 4, 1))
    tl.store(place + tl.arange(0, SIDE * SIDE // 2), ordered.reshape([SIDE * SIDE // 2]))


@triton.jit(do_not_specialize=["centre", "origin", "count"])
def _distances_kernel(
    out, position_table, centre, origin, count, REVERSED: tl.constexpr, IS_BF16: tl.constexpr, LINES: tl.constexpr
):
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)[:, None]
    lane = tl.arange(0, 32)[None, :]
    apart = 8 * (line - origin) + lane // 4 - 2 * (lane % 4)  # row less column; that of the neighbour is one less
    one_less = apart - 1
    if not REVERSED:
        apart, one_less = -apart, -one_less
    even = tl.load(position_table + centre + apart, mask=tl.abs(apart) <= centre, other=0.0).to(tl.float32)
    odd = tl.load(position_table + centre + one_less, mask=tl.abs(one_less) <= centre, other=0.0).to(tl.float32)
    tl.store(out + line * 32 + lane, _words(even, odd, IS_BF16), mask=line < count)


@triton.jit(do_not_specialize=["num_tiles", "centre"])
def _words_kernel(
    out,
    schedule,
    state,
    first_tile,
    buckets,
    time_table,
    function,
    query_time,
    key_time,
    position_table,
    centre,
    targets,
    num_tiles,
    num_splits,
    IS_SQUARE: tl.constexpr,
    REVERSED: tl.constexpr,
    IS_BF16: tl.constexpr,
    FAST: tl.constexpr,
    SIDE: tl.constexpr,
):
    item = tl.program_id(0)
    if item >= tl.load(state):
        return
    row = row_of_tiles(schedule, item, first_tile, IS_SQUARE, SIDE)
    for other in range(tl.program_id(1), row[5], num_splits):
        if row[4] + other < num_tiles:
            write_tile(
                out,
                row,
                other,
                buckets,
                time_table,
                function,
                query_time,
                key_time,
                position_table,
                centre,
                targets,
                REVERSED,
                IS_BF16,
                FAST,
                SIDE,
            )


@triton.jit
def write_tile(
    out,
    row,
    other,
    buckets,
    time_table,
    function,
    query_time,
    key_time,
    position_table,
    centre,
    targets,
    REVERSED: tl.constexpr,
    IS_BF16: tl.constexpr,
    FAST: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Biases of a block of queries, `row_of_tiles`, and another block of its sequence."""
    start, length, b, block, first, count = row
    # Targets share a place. Rows behind the end take the last one: any number does for them, if it is one.
    last = length - 1
    if targets is not None:
        last = tl.minimum(tl.maximum(length - tl.load(targets + b).to(tl.int32), 0), last)
    one = tl.arange(0, SIDE)
    i, j = block * SIDE + one, other * SIDE + one
    tile = (first + other).to(tl.int64)
    value = tl.zeros([SIDE, SIDE], tl.float32)  # key by key
    if time_table is not None:
        place = buckets + tile * (SIDE * SIDE) + one[:, None] * SIDE + one[None, :]
        value += tl.load(time_table + tl.load(place).to(tl.int32)).to(tl.float32)
    if function is not None:
        asked = tl.load(query_time + start + i, mask=i < length, other=0.0)
        seen_at = tl.load(key_time + start + j, mask=j < length, other=0.0)
        shape, _, _ = time_function(function, seen_at, asked, FAST)
        value += tl.load(function).to(tl.float32) * shape
    if position_table is not None:
        place = position_table + (centre + tl.minimum(j, last))[:, None] - tl.minimum(i, last)[None, :]
        value += tl.load(place).to(tl.float32)
    if not REVERSED:
        value = tl.trans(value)
    _store_words(out + tile * (SIDE * SIDE // 2), value, IS_BF16, SIDE)
