"""Work table of `paged_attention`: one row per block of queries, written by the host for every batch.

If there are too few blocks to occupy the device, prefixes are split along the keys into parts of full key blocks
(split-K, as in flash decoding); the last part also covers the new tokens. The host writes the table while the device
computes the previous batch, so the code is compiled with Numba.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

BLOCK_ROWS = 128
"""Number of queries per block. With 64, reading keys and values from L2 limits the kernel to a third of its peak."""
BLOCK_KEYS = 64
"""Number of keys per block."""
FIELDS = 18
"""Number of fields per row of the work table:

0. first row of the batch
1. number of rows; 0 for an unused block
2. end of its part of the prefix
3. first page
4. first row of the new history
5. number of new history tokens before its first row
6. number of new history tokens visible to its last row; 0 except in the last part
7. 1 + its first row among the candidates, or 0 for history rows
8. begin of its part of the prefix
9. number of parts
10. index of this part
11. index of its first part in the workspace
12. number of tokens at the beginning of the prefix that are read
13. position from which later tokens of the history are read
14. number of tokens of the prefix
15. first visible position of the history
16. first of its bias tiles
17. whether this block writes its bias tiles

The bounds of parts (fields 2 and 8) count only the tokens that are read."""
MAX_PARTS = 128
"""Maximum number of blocks of a batch with split prefixes; every part counts."""
_MIN_PAGE_TOKENS = 16
"""Minimum number of tokens per page: the smallest number of keys of a matrix product."""
_MAX_SHARED_BYTES = 227 << 10
"""Maximum shared memory per program on Hopper in bytes."""
_PROGRAMS = 256
"""Target number of programs: two rounds on every multiprocessor of an H100 or H200, so that lengths even out."""
_MIN_PART_KEYS = 512
"""Minimum number of keys per part; for shorter parts, combining them costs more than the split gains."""
_UNLIMITED_WINDOW = 1 << 30
"""Attention window that includes all keys."""


class VisibleRange(NamedTuple):
    """Range of keys that the queries of a layer attend to, as plain numbers for compiled functions."""

    window: int = 0
    """Attention window in tokens; 0 is unlimited."""
    context: int = 0
    """Number of leading tokens that are visible in addition to the window."""
    is_cut: bool = False
    """Whether tokens before `PagedSegment.cut` are hidden."""

    @property
    def reach(self) -> int:
        """Window passed to the kernels; 0 if all keys are visible.

        A cut without a window is passed as a window that includes all keys, because kernels check visibility only if
        the window is not 0.
        """
        return _UNLIMITED_WINDOW if self.is_cut and not self.window else self.window


SEES_ALL = VisibleRange()


def padded(dim: int) -> int:
    """Return the padded number of columns of a head inside a kernel."""
    return max(16, 1 << (dim - 1).bit_length())


def can_be_paged(head_dim: int, itemsize: int, page_tokens: int) -> bool:
    """Return whether a block fits into shared memory and the pages consist of complete key blocks.

    Args:
        head_dim: Head dimension.
        itemsize: Bytes per element of queries, keys and values.
        page_tokens: Number of tokens per page.
    """
    fits_shared_memory = (BLOCK_ROWS + 2 * BLOCK_KEYS) * padded(head_dim) * itemsize <= _MAX_SHARED_BYTES
    keys = min(BLOCK_KEYS, page_tokens)
    return fits_shared_memory and page_tokens % keys == 0 and keys >= _MIN_PAGE_TOKENS and keys.bit_count() == 1


def max_tiles(num_blocks: int, max_length: int) -> int:
    """Return an upper bound on the bias tiles of `num_blocks` blocks with histories of up to `max_length` tokens."""
    return num_blocks * (-(-max_length // BLOCK_KEYS) + 4)


class PagedSegment(NamedTuple):
    """New tokens of one sequence: their rows in the batch and the pages of their prefix."""

    prefix_length: int
    """Number of cached tokens."""
    num_history: int
    """Number of new history tokens."""
    num_candidates: int
    """Number of candidates."""
    history_row: int
    """First row of the new history in the batch."""
    candidate_row: int
    """First row of the candidates in the batch."""
    first_page: int
    """Index of the first page of the sequence in the block table."""
    cut: int = 0
    """First visible position of the history in layers whose range `is_cut`."""


def segment_array(segments: Sequence[PagedSegment]) -> NDArray[np.int64]:
    """Return the segments as an array for `write_blocks`, (segments, 7)."""
    return np.array(segments, np.int64).reshape(len(segments), 7)


def write_blocks(
    segments: NDArray[np.int64],
    num_heads: int,
    candidates_only: bool,
    out: NDArray[np.int32],
    visible_range: VisibleRange = SEES_ALL,
) -> int:
    """Write the work table of a batch, longest blocks first, and return the number of blocks.

    Args:
        segments: Result of `segment_array`.
        num_heads: Number of attention heads.
        candidates_only: Whether to write blocks of candidates only.
        out: Table to fill, (blocks, FIELDS); unused rows are set to 0. It must be large enough for all unsplit blocks.
        visible_range: Keys that the layer attends to.
    """
    return _write_blocks(
        segments,
        num_heads,
        candidates_only,
        out,
        visible_range.reach,
        visible_range.context,
        visible_range.is_cut,
    )


@njit(cache=True)  # no nogil: it runs for a few microseconds, and releasing and acquiring the GIL would take longer
def _write_blocks(  # noqa: PLR0917 - compiled functions take their arguments by position
    segments: NDArray[np.int64],
    num_heads: int,
    candidates_only: bool,
    out: NDArray[np.int32],
    window: int,
    context: int,
    is_cut: bool,
) -> int:
    keys = _part_keys(segments, num_heads, candidates_only, min(len(out), MAX_PARTS), window + context)
    first_candidate = segments[:, 1].sum()
    blocks = np.zeros(out.shape, np.int32)
    count, tile = 0, 0
    for i in range(len(segments)):
        prefix, history, num_candidates, history_row, candidate_row, page, cut = segments[i]
        visible = (window, context, cut if is_cut else 0)
        for first in range(0, 0 if candidates_only else history, BLOCK_ROWS):
            rows = min(BLOCK_ROWS, history - first)
            fields = (history_row + first, rows, page, history_row, first, first + rows, 0)
            count, tile = _write_parts(blocks, count, tile, prefix, keys, fields, visible, True)
        shared = tile  # candidates share position and query time, so their biases are the same
        for first in range(0, num_candidates, BLOCK_ROWS):
            rows = min(BLOCK_ROWS, num_candidates - first)
            row = candidate_row + first
            fields = (row, rows, page, history_row, history, history, row - first_candidate + 1)
            count, tile = _write_parts(blocks, count, shared, prefix, keys, fields, visible, first == 0)
    _sort(blocks, count, out)
    return count


@njit(cache=True, nogil=True)
def _part_keys(
    segments: NDArray[np.int64], num_heads: int, candidates_only: bool, max_parts: int, max_visible: int
) -> int:
    """Return the maximum number of prefix keys per part; `max_visible` limits the keys per query, 0 is unlimited."""
    total, longest = 0, 0
    for i in range(len(segments)):
        prefix = _num_read(segments[i, 0], max_visible)
        history = segments[i, 1]
        num_candidates = segments[i, 2]
        num_blocks = _num_blocks(num_candidates)
        total += num_blocks * (prefix + history)
        if not candidates_only:
            num_blocks += _num_blocks(history)
            total += _num_blocks(history) * (prefix + (history + BLOCK_ROWS) // 2)
        longest = max(longest, prefix if num_blocks else 0)
    keys = max(_MIN_PART_KEYS, total * num_heads // _PROGRAMS)
    while keys < longest:
        num_parts = 0
        for i in range(len(segments)):
            num_blocks = _num_blocks(segments[i, 2]) + (0 if candidates_only else _num_blocks(segments[i, 1]))
            num_parts += num_blocks * max(1, -(-_num_read(segments[i, 0], max_visible) // keys))
        if num_parts <= max_parts:
            break
        keys *= 2
    return keys


@njit(cache=True, nogil=True)
def _num_read(prefix: int, max_visible: int) -> int:
    """Return the maximum number of prefix tokens that a block reads: full key blocks at both ends of its range."""
    return min(prefix, max_visible + BLOCK_ROWS + 2 * BLOCK_KEYS) if max_visible else prefix


@njit(cache=True, nogil=True)
def _num_blocks(rows: int) -> int:
    return -(-rows // BLOCK_ROWS)


@njit(cache=True, nogil=True)
def _write_parts(  # noqa: PLR0917
    blocks: NDArray[np.int32],
    count: int,
    tile: int,
    prefix_length: int,
    keys: int,
    fields: tuple[int, int, int, int, int, int, int],
    visible: tuple[int, int, int],
    is_writer: bool,
) -> tuple[int, int]:
    """Write the parts of one block and return the new numbers of blocks and tiles."""
    row, rows, page, history_row, first, num_seen, candidate = fields
    window, context, floor = visible
    low = 0
    num_context_read = 0
    prefix = prefix_length
    if window:
        low = max(0, prefix_length + first - window + 1, floor)
        if low > prefix_length:  # key blocks of the new history are aligned to its first token
            low = (
                prefix_length + (low - prefix_length) // BLOCK_KEYS * BLOCK_KEYS
                if context <= prefix_length
                else prefix_length
            )
        else:
            low = low // BLOCK_KEYS * BLOCK_KEYS
        num_context_read = min(-(-context // BLOCK_KEYS) * BLOCK_KEYS, low)
        prefix = min(num_context_read, prefix_length) + max(0, prefix_length - low)
    num_parts = max(1, -(-prefix // keys))
    size = -(-prefix // (num_parts * BLOCK_KEYS)) * BLOCK_KEYS
    for part in range(num_parts):
        block = blocks[count + part]
        is_last = part == num_parts - 1
        block[0] = row
        block[1] = rows
        block[3] = page
        block[4] = history_row
        block[5] = first
        block[2] = prefix if is_last else min((part + 1) * size, prefix)
        block[6] = num_seen if is_last else 0
        block[7] = candidate
        block[8] = min(part * size, prefix)
        block[9] = num_parts
        block[10] = part
        block[11] = count
        block[12] = num_context_read
        block[13] = low
        block[14] = prefix_length
        block[15] = floor
        block[16] = tile
        block[17] = is_writer
        tile += -(-(block[2] - block[8]) // BLOCK_KEYS)
    tile += -(-num_seen // BLOCK_KEYS) + 1  # new history, and a candidate with itself
    return count + num_parts, tile


@njit(cache=True, nogil=True)
def _sort(blocks: NDArray[np.int32], count: int, out: NDArray[np.int32]) -> None:
    """Sort blocks in descending order of their number of keys; the sort is stable."""
    order = np.arange(count)
    num_keys = blocks[:count, 2] - blocks[:count, 8] + blocks[:count, 6]
    for i in range(1, count):
        one = order[i]
        j = i - 1
        while j >= 0 and num_keys[order[j]] < num_keys[one]:
            order[j + 1] = order[j]
            j -= 1
        order[j + 1] = one
    for i in range(count):
        out[i] = blocks[order[i]]
    out[count:] = 0
