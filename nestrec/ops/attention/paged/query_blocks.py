"""What each program of `paged_attention` computes: a table of blocks of queries, written by the host for every batch.

Where blocks are so few that most of the device would wait for the longest of them, prefixes are divided into parts of
whole key blocks, of which the last also has what is new. The host writes it while the device is busy with the batch
before, so it is compiled and needs no interpreter.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

BLOCK_ROWS = 128
"""of queries: with 64 of them, reading keys and values from L2 bounds the kernel, at a third of what it can multiply"""
BLOCK_KEYS = 64
FIELDS = 18
"""of a block: first row, rows, end of its part of the prefix, first page, first row of the new history, new history
before its first row, new history that its last row sees, 1 + first row among the candidates or 0, begin of its part of
the prefix, parts, number of this part, where the parts are gathered; tokens at the beginning of the prefix that are
read beside those from another one on, that one (of the whole history), tokens of the prefix, the first token of the
history that is seen at all, the first of its tiles of biases, whether they are its own to write. Parts count what is
read."""
MOST_PARTS = 128
"""blocks of a batch with divided prefixes, each part counted"""
_FEWEST_TOKENS = 16
"""of a page: products take no fewer keys"""
_MOST_BYTES = 227 << 10
"""of shared memory for a program of Hopper"""
_PROGRAMS = 256
"""that keep every multiprocessor of an H100 or H200 busy: two, one after the other, so that lengths even out"""
_FEWEST_KEYS = 512
"""of a part: less is not worth the sum"""
_EVERYTHING = 1 << 30
"""a window that hides nothing"""


class VisibleRange(NamedTuple):
    """What the blocks of some layers see; numbers, as compiled functions take them."""

    window: int = 0
    """tokens; 0: all"""
    context: int = 0
    """first tokens that are seen beside the window"""
    is_cut: bool = False
    """whether what stands before the cut of a history is not seen"""

    @property
    def reach(self) -> int:
        """The window of kernels, which know none without it; 0 where they need not look."""
        return _EVERYTHING if self.is_cut and not self.window else self.window


SEES_ALL = VisibleRange()


def padded(dim: int) -> int:
    """Columns of a head inside a kernel."""
    return max(16, 1 << (dim - 1).bit_length())


def can_be_paged(head_dim: int, itemsize: int, page_tokens: int) -> bool:
    """Whether queries, keys and values of a block have room beside each other, and pages are made of whole blocks."""
    has_room = (BLOCK_ROWS + 2 * BLOCK_KEYS) * padded(head_dim) * itemsize <= _MOST_BYTES
    keys = min(BLOCK_KEYS, page_tokens)
    return has_room and page_tokens % keys == 0 and keys >= _FEWEST_TOKENS and keys.bit_count() == 1


def most_tiles(num_blocks: int, max_length: int) -> int:
    """Tiles of biases that so many blocks have at most, of histories of so many tokens."""
    return num_blocks * (-(-max_length // BLOCK_KEYS) + 4)


class PagedSegment(NamedTuple):
    """New tokens of one sequence: where its rows lie in the batch and its pages in the table of pages."""

    prefix_length: int
    num_history: int
    num_candidates: int
    history_row: int
    candidate_row: int
    first_page: int
    cut: int = 0


def segment_array(segments: Sequence[PagedSegment]) -> NDArray[np.int64]:
    """(segments, 7) as `write_blocks` takes them."""
    return np.array(segments, np.int64).reshape(len(segments), 7)


def write_blocks(
    segments: NDArray[np.int64],
    num_heads: int,
    candidates_only: bool,
    out: NDArray[np.int32],
    seen: VisibleRange = SEES_ALL,
) -> int:
    """Fill a table, the longest blocks first, zeros after the last; how many blocks there are. The table has room for
    all of them undivided."""
    return _write_blocks(segments, num_heads, candidates_only, out, seen.reach, seen.context, seen.is_cut)


@njit(cache=True)  # some microseconds: giving up the interpreter and asking for it again would take longer
def _write_blocks(  # noqa: PLR0917 - compiled functions take their arguments by position
    segments: NDArray[np.int64],
    num_heads: int,
    candidates_only: bool,
    out: NDArray[np.int32],
    window: int,
    context: int,
    is_cut: bool,
) -> int:
    keys = _keys_a_part(segments, num_heads, candidates_only, min(len(out), MOST_PARTS), window + context)
    first_candidate = segments[:, 1].sum()
    blocks = np.zeros(out.shape, np.int32)
    count, tile = 0, 0
    for i in range(len(segments)):
        prefix, history, asked, history_row, candidate_row, page, cut = segments[i]
        seen = (window, context, cut if is_cut else 0)
        for first in range(0, 0 if candidates_only else history, BLOCK_ROWS):
            rows = min(BLOCK_ROWS, history - first)
            place = (history_row + first, rows, page, history_row, first, first + rows, 0)
            count, tile = _write_parts(blocks, count, tile, prefix, keys, place, seen, True)
        shared = tile  # candidates stand at one place and ask at one time: their biases are the same
        for first in range(0, asked, BLOCK_ROWS):
            rows = min(BLOCK_ROWS, asked - first)
            row = candidate_row + first
            place = (row, rows, page, history_row, history, history, row - first_candidate + 1)
            count, tile = _write_parts(blocks, count, shared, prefix, keys, place, seen, first == 0)
    _sort(blocks, count, out)
    return count


@njit(cache=True, nogil=True)
def _keys_a_part(segments: NDArray[np.int64], num_heads: int, candidates_only: bool, most: int, seen: int) -> int:
    """Of a prefix, at most. seen: tokens of it that one sees at most; 0: all."""
    total, longest = 0, 0
    for i in range(len(segments)):
        prefix = _read(segments[i, 0], seen)
        history = segments[i, 1]
        asked = segments[i, 2]
        num_blocks = _num_blocks(asked)
        total += num_blocks * (prefix + history)
        if not candidates_only:
            num_blocks += _num_blocks(history)
            total += _num_blocks(history) * (prefix + (history + BLOCK_ROWS) // 2)
        longest = max(longest, prefix if num_blocks else 0)
    keys = max(_FEWEST_KEYS, total * num_heads // _PROGRAMS)
    while keys < longest:
        num_parts = 0
        for i in range(len(segments)):
            num_blocks = _num_blocks(segments[i, 2]) + (0 if candidates_only else _num_blocks(segments[i, 1]))
            num_parts += num_blocks * max(1, -(-_read(segments[i, 0], seen) // keys))
        if num_parts <= most:
            break
        keys *= 2
    return keys


@njit(cache=True, nogil=True)
def _read(prefix: int, seen: int) -> int:
    """Tokens of a prefix that a block reads at most: whole blocks of keys at both ends of what it sees."""
    return min(prefix, seen + BLOCK_ROWS + 2 * BLOCK_KEYS) if seen else prefix


@njit(cache=True, nogil=True)
def _num_blocks(rows: int) -> int:
    return -(-rows // BLOCK_ROWS)


@njit(cache=True, nogil=True)
def _write_parts(  # noqa: PLR0917
    blocks: NDArray[np.int32],
    count: int,
    tile: int,
    whole: int,
    keys: int,
    place: tuple[int, int, int, int, int, int, int],
    seen: tuple[int, int, int],
    is_writer: bool,
) -> tuple[int, int]:
    """How many blocks and tiles there are then."""
    row, rows, page, history_row, first, num_seen, candidate = place
    window, context, floor = seen
    low = 0
    kept = 0
    prefix = whole
    if window:
        low = max(0, whole + first - window + 1, floor)
        if low > whole:  # new history has whole blocks of its own
            low = whole + (low - whole) // BLOCK_KEYS * BLOCK_KEYS if context <= whole else whole
        else:
            low = low // BLOCK_KEYS * BLOCK_KEYS
        kept = min(-(-context // BLOCK_KEYS) * BLOCK_KEYS, low)
        prefix = min(kept, whole) + max(0, whole - low)
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
        block[12] = kept
        block[13] = low
        block[14] = whole
        block[15] = floor
        block[16] = tile
        block[17] = is_writer
        tile += -(-(block[2] - block[8]) // BLOCK_KEYS)
    tile += -(-num_seen // BLOCK_KEYS) + 1  # what is new, and a candidate with itself
    return count + num_parts, tile


@njit(cache=True, nogil=True)
def _sort(blocks: NDArray[np.int32], count: int, out: NDArray[np.int32]) -> None:
    """By the number of keys; equal ones keep their order."""
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
