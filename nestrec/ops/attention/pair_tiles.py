"""Tiles of token pairs: time buckets (one byte per pair) and packed biases in the layout of matrix instructions.

A tile is 64 queries by 64 keys. Tiles at or below the diagonal are stored, or all tiles if a contextual prefix looks
ahead; the tiles of a sequence are stored row by row. Time buckets are computed once per batch and stored key by key.
Biases are written before a pass, two bytes per pair, and read by the pass once per head: a 32-bit word packs the
biases of two adjacent columns, and the words of a tile are ordered as the threads of a matrix instruction use them.

    word 512 u + 4 (32 w + 4 r + c) + 2 k + h      is row 16 w + 8 h + r, columns 16 u + 8 k + 2 c and the next

If biases depend on the distance only, words repeat: the 8 rows and 8 columns of a matrix instruction have one word for
each of 32 threads, which is the same for all tiles of equal distance. So one line of 32 words is stored for every 8
tokens of distance, and a thread needs 9 words of adjacent lines per tile instead of 16:

    word 4 r + c of a line m       is row - column = 8 m + r - 2 c, and the next column

A word of two bfloat16 values is used without masking: shifted left by 16 bits it is the first value, and unchanged it
is the second, whose own 16 bits are chosen with the trailing bits in mind. So both are within half a unit of bfloat16.
The stored value is half of the bias, because SiLU is computed from half of the score: adding it costs no extra
instruction.

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
"""Number of rows and of columns of a tile."""
WORDS = SIDE * SIDE // 2
"""Number of 32-bit words that hold the biases of a tile."""
LANES, LINES = 32, 32
"""Number of words per line if biases depend on the distance only, and number of lines written by one program."""
LARGEST_BUCKET = 255
MAX_BYTES = 8 << 30
"""Maximum size of the stored biases of a batch in bytes; larger batches use kernels that compute biases themselves."""
SPLITS = 8
"""Number of programs that share a row of tiles."""


class TilePlan(NamedTuple):
    """Numbering of the tiles of a batch."""

    first_B: torch.Tensor
    """First tile of each sequence, (B,) int32."""
    max_tiles: int
    """Upper bound on the number of tiles, including some above the diagonal that are read but not used."""
    is_square: bool
    """Whether tiles above the diagonal are stored too."""


def max_tiles(num_tokens: int, num_sequences: int, max_length: int, *, is_square: bool) -> int:
    """Return an upper bound on the tiles of a batch, including some above the diagonal that are read but not used."""
    longest = -(-max_length // SIDE)
    rows = num_tokens // SIDE + num_sequences
    return (rows * longest if is_square else rows * (longest + 1) // 2) + 4


def plan_tiles(
    offsets: torch.Tensor, num_tokens: int, max_length: int, *, is_square: bool, block: int = SIDE
) -> tuple[TilePlan, WorkOrder]:
    """Number the tiles of a batch and schedule blocks of `block` rows in one launch, without a device sync."""
    num_sequences = offsets.numel() - 1
    first_B = torch.empty(max(num_sequences, 1), dtype=torch.int32, device=offsets.device)
    schedule = make_schedule(offsets, num_tokens, block, first_B, side=SIDE, is_square=is_square)
    num_tiles = max_tiles(num_tokens, num_sequences, max_length, is_square=is_square)
    return TilePlan(first_B, num_tiles, is_square), schedule


def fits(bias: RelativeBias, offsets: torch.Tensor, num_tokens: int, max_length: int, *, is_square: bool) -> bool:
    """Return whether time buckets fit into one byte and the stored biases into `MAX_BYTES`."""
    tiles = max_tiles(num_tokens, offsets.numel() - 1, max_length, is_square=is_square)
    buckets = 0 if bias.time_table is None else bias.time_table.numel()
    return buckets <= LARGEST_BUCKET + 1 and tiles * SIDE * SIDE * 2 <= MAX_BYTES


def pair_buckets(
    time_T: torch.Tensor, query_time_T: torch.Tensor, offsets: torch.Tensor, plan: TilePlan, num_buckets: int
) -> torch.Tensor:
    """Compute the time buckets of all pairs, (tiles, keys, queries) uint8."""
    buckets = torch.empty(plan.max_tiles, SIDE, SIDE, dtype=torch.uint8, device=offsets.device)
    schedule = make_schedule(offsets, time_T.numel(), SIDE)
    _buckets_kernel[schedule.table.shape[0], SPLITS](
        buckets,
        *schedule,
        plan.first_B,
        query_time_T,
        time_T,
        bucket_edges(num_buckets, offsets.device),
        num_buckets,
        plan.max_tiles,
        SPLITS,
        IS_SQUARE=plan.is_square,
        SIDE=SIDE,
        num_warps=4,
    )
    return buckets


@triton.jit
def row_of_tiles(schedule, item, first_tile, IS_SQUARE: tl.constexpr, SIDE: tl.constexpr):
    """Return first token, length and index of the sequence, the block of queries, its first tile and its tile count."""
    entry = schedule + 4 * item
    start, length, before, b = tl.load(entry).to(tl.int64), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    block = item - before
    blocks = (length + SIDE - 1) // SIDE
    if IS_SQUARE:
        first = block * blocks
        count = blocks
    else:
        first = block * (block + 1) // 2
        count = block + 1
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
    query_seconds = tl.load(query_time + start + i, mask=i < length, other=0.0)
    for other in range(tl.program_id(1), count, num_splits):
        j = other * SIDE + one
        key_seconds = tl.load(key_time + start + j, mask=j < length, other=0.0)
        bucket = time_bucket(query_seconds[None, :] - key_seconds[:, None], edges, num_buckets)
        pointers = out + (first + other).to(tl.int64) * (SIDE * SIDE) + one[:, None] * SIDE + one[None, :]
        tl.store(pointers, bucket.to(tl.uint8), mask=first + other < num_tiles)


class BiasWords(NamedTuple):
    """Packed biases of the pairs of a batch, as a pass reads them."""

    words: torch.Tensor | None
    """Packed biases, (tiles, WORDS) or (lines, LANES) int32; None without biases."""
    origin: int
    """Index of the line of distance 0 if `words` has one line per distance; -1 if it has one tile per tile of pairs."""


NO_WORDS = BiasWords(None, -1)


def needs_pairs(bias: RelativeBias, *, has_targets: bool) -> bool:
    """Return whether biases differ between tiles of equal distance, so that they are stored per pair."""
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
    """Write the packed biases of a batch.

    Args:
        bias: Position and time bias.
        buckets: Result of `pair_buckets`; required by a time table.
        offsets: Bounds of the sequences, (B + 1,) int64.
        num_tokens: Number of tokens of all sequences.
        max_length: Upper bound on the sequence lengths of the batch.
        plan: Tiles of the batch, or None if biases depend on the distance only.
        targets_B: Number of targets per sequence; None if there are none.
        is_square: Whether tiles above the diagonal are stored too.
        is_reversed: Whether rows of a tile are keys instead of queries.
        dtype: Dtype of the matrix products that read the biases, bfloat16 or float16.
    """
    position = bias.position_table
    shared: dict[str, Any] = {"REVERSED": is_reversed, "IS_BF16": dtype == torch.bfloat16, "num_warps": 4}
    center = 0 if position is None else (position.numel() - 1) // 2
    if plan is None:
        assert position is not None
        origin = -(-max_length // 8) + 4 * (SIDE // 8)
        words = torch.empty(2 * origin + 1, LANES, dtype=torch.int32, device=offsets.device)
        _distances_kernel[(-(-len(words) // LINES),)](
            words, position, center, origin, len(words), LINES=LINES, **shared
        )
        return BiasWords(words, origin)
    words = torch.empty(plan.max_tiles, WORDS, dtype=torch.int32, device=offsets.device)
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
        center,
        targets_B,
        plan.max_tiles,
        SPLITS,
        IS_SQUARE=is_square,
        SIDE=SIDE,
        FAST=not IS_INTERPRETED,
        **shared,
    )
    return BiasWords(words, -1)


@triton.jit
def _bits(value, IS_BF16: tl.constexpr):
    """Return the 16 bits of a value rounded to nearest."""
    if IS_BF16:
        bits = value.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    else:
        return value.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _words(even, odd, IS_BF16: tl.constexpr):
    """Pack the halves of two adjacent values into one word."""
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
def _store_words(pointers, value, IS_BF16: tl.constexpr, SIDE: tl.constexpr):
    """Store the halves of a tile of values in the layout of the module docstring."""
    even, odd = tl.split(value.reshape([SIDE, SIDE // 2, 2]))
    words = _words(even, odd, IS_BF16)
    # Permute rows (w, h, r) and columns (u, k, c) to (u, w, r, c, k, h).
    ordered = words.reshape([4, 2, 8, 4, 2, 4]).permute((3, 0, 2, 5, 4, 1))
    tl.store(pointers + tl.arange(0, SIDE * SIDE // 2), ordered.reshape([SIDE * SIDE // 2]))


@triton.jit(do_not_specialize=["center", "origin", "count"])
def _distances_kernel(
    out, position_table, center, origin, count, REVERSED: tl.constexpr, IS_BF16: tl.constexpr, LINES: tl.constexpr
):
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)[:, None]
    lane = tl.arange(0, 32)[None, :]
    apart = 8 * (line - origin) + lane // 4 - 2 * (lane % 4)  # row - column; one less for the adjacent column
    one_less = apart - 1
    if not REVERSED:
        apart, one_less = -apart, -one_less
    even = tl.load(position_table + center + apart, mask=tl.abs(apart) <= center, other=0.0).to(tl.float32)
    odd = tl.load(position_table + center + one_less, mask=tl.abs(one_less) <= center, other=0.0).to(tl.float32)
    tl.store(out + line * 32 + lane, _words(even, odd, IS_BF16), mask=line < count)


@triton.jit(do_not_specialize=["num_tiles", "center"])
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
    center,
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
                center,
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
    center,
    targets,
    REVERSED: tl.constexpr,
    IS_BF16: tl.constexpr,
    FAST: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Write the biases of a block of queries (a result of `row_of_tiles`) and another block of its sequence."""
    start, length, b, block, first, count = row
    # Targets share a position. Rows after the end take the last one, because any finite value will do for them.
    last = length - 1
    if targets is not None:
        last = tl.minimum(tl.maximum(length - tl.load(targets + b).to(tl.int32), 0), last)
    one = tl.arange(0, SIDE)
    i = block * SIDE + one
    j = other * SIDE + one
    tile = (first + other).to(tl.int64)
    value = tl.zeros([SIDE, SIDE], tl.float32)  # (keys, queries)
    if time_table is not None:
        pointers = buckets + tile * (SIDE * SIDE) + one[:, None] * SIDE + one[None, :]
        value += tl.load(time_table + tl.load(pointers).to(tl.int32)).to(tl.float32)
    if function is not None:
        query_seconds = tl.load(query_time + start + i, mask=i < length, other=0.0)
        key_seconds = tl.load(key_time + start + j, mask=j < length, other=0.0)
        shape, _, _ = time_function(function, key_seconds, query_seconds, FAST)
        value += tl.load(function).to(tl.float32) * shape
    if position_table is not None:
        pointers = position_table + (center + tl.minimum(j, last))[:, None] - tl.minimum(i, last)[None, :]
        value += tl.load(pointers).to(tl.float32)
    if not REVERSED:
        value = tl.trans(value)
    _store_words(out + tile * (SIDE * SIDE // 2), value, IS_BF16, SIDE)
