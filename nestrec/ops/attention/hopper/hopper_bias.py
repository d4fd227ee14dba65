"""Pair biases in the Hopper attention kernels: unpacks words of pair_tiles.py to elements of a tile of scores.

A thread of a matrix instruction owns some elements of a tile. Their words are contiguous in memory, so the thread loads
them while the product runs and adds them without moving data between threads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0917, RUF059


@gluon.jit
def tile_of(first_tile, x0, y0, length, REVERSED: gl.constexpr, IS_SQUARE: gl.constexpr):
    """Return the index of the tile of pairs of the rows from x0 on and the rows from y0 on."""
    if REVERSED:
        query_block = y0 // 64
        key_block = x0 // 64
    else:
        query_block = x0 // 64
        key_block = y0 // 64
    if IS_SQUARE:
        return first_tile + query_block * ((length + 63) // 64) + key_block
    else:
        return first_tile + query_block * (query_block + 1) // 2 + key_block


@gluon.jit
def _load_tile(words, tile, first_chunk, CHUNKS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, CHUNKS, 4], [32, 1, 1], [4, 1, 1], [2, 1, 0])
    thread = gl.arange(0, 128, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    chunk = gl.arange(0, CHUNKS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    return gl.load(words + tile.to(gl.int64) * 2048 + first_chunk * 512 + chunk * 512 + thread * 4 + word)


@gluon.jit
def _lines(words, first, NUM: gl.constexpr):
    """Load the words of NUM lines in descending order from line `first`; each warp starts two lines after the last."""
    thread = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    pointers = words + first * 32 + thread + thread // 32 * 32
    if NUM == 4:
        return gl.load(pointers), gl.load(pointers - 32), gl.load(pointers - 64), gl.load(pointers - 96)
    else:
        return gl.load(pointers)


@gluon.jit
def _by_distance(words, line, YB: gl.constexpr):
    """Load the lines of the columns of a tile, 16 columns at a time, each two lines before the previous ones."""
    if YB == 32:
        return _lines(words, line + 1, 4), _lines(words, line - 3, 1)
    elif YB == 64:
        return _lines(words, line + 1, 4), _lines(words, line - 3, 4), _lines(words, line - 7, 1)
    else:
        return (
            _lines(words, line + 1, 4),
            _lines(words, line - 3, 4),
            _lines(words, line - 7, 4),
            _lines(words, line - 11, 4),
            _lines(words, line - 15, 1),
        )


@gluon.jit
def _sixteen(above, same, below):
    """Arrange the words of three lines as a 16 x 16 tile: (threads, upper or lower 8 rows, left or right 8 columns)."""
    return gl.join(gl.join(same, above), gl.join(below, same))


@gluon.jit
def _thirty_two(four, next_line):
    return gl.join(_sixteen(four[0], four[1], four[2]), _sixteen(four[2], four[3], next_line))


@gluon.jit
def _of_distances(words, FAST: gl.constexpr, YB: gl.constexpr):
    """Unpack the lines of `_by_distance` to biases of a tile, (rows, columns)."""
    if YB == 32:
        all_words = _thirty_two(words[0], words[1])
        each = _values(all_words, FAST).reshape([4, 8, 4, 2, 2, 2, 2])
        return each.permute((0, 3, 1, 5, 4, 2, 6)).reshape([64, YB])
    elif YB == 64:
        all_words = gl.join(_thirty_two(words[0], words[1][0]), _thirty_two(words[1], words[2]))
        each = _values(all_words, FAST).reshape([4, 8, 4, 2, 2, 2, 2, 2])
        return each.permute((0, 3, 1, 6, 5, 4, 2, 7)).reshape([64, YB])
    else:
        low = gl.join(_thirty_two(words[0], words[1][0]), _thirty_two(words[1], words[2][0]))
        high = gl.join(_thirty_two(words[2], words[3][0]), _thirty_two(words[3], words[4]))
        each = _values(gl.join(low, high), FAST).reshape([4, 8, 4, 2, 2, 2, 2, 2, 2])
        return each.permute((0, 3, 1, 7, 6, 5, 4, 2, 8)).reshape([64, YB])


@gluon.jit
def load_words(
    first_tile,
    x0,
    y0,
    length,
    bias,
    REVERSED: gl.constexpr,
    IS_SQUARE: gl.constexpr,
    YB: gl.constexpr,
    BY_DISTANCE: gl.constexpr,
):
    """Load the packed biases of a tile of scores; returns 0 if there are no biases."""
    words, origin, first, bounds = bias
    if words is None:
        return 0
    elif BY_DISTANCE:
        return _by_distance(words, origin + (x0 - y0) // 8, YB)
    else:
        tile = tile_of(first_tile, x0, y0, length, REVERSED, IS_SQUARE)
        if YB == 128:
            gl.static_assert(not REVERSED)
            return _load_tile(words, tile, 0, 4), _load_tile(words, tile + 1, 0, 4)
        elif YB == 32:
            return _load_tile(words, tile, y0 // 32 % 2 * 2, 2)
        else:
            return _load_tile(words, tile, 0, 4)


@gluon.jit
def staged_words(smem):
    """Load a tile of words from shared memory, (64, 32) in the order of pair_tiles.py; each thread loads its own."""
    return smem.load(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def staged_halves(s, words, FAST: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the result of `halves` for words loaded by `staged_words`."""
    each = _values(words, FAST).reshape([4, 4, 4, 2, 4, 2, 2, 2])
    return s * 0.5 + gl.convert_layout(each.permute((1, 6, 2, 3, 0, 5, 4, 7)).reshape([64, 64]), LAYOUT)


@gluon.jit
def _values(words, FAST: gl.constexpr):
    """Unpack words to float32 values, (..., 2), from bfloat16 if FAST, else from float16."""
    if FAST:
        return gl.join((words << 16).to(gl.float32, bitcast=True), words.to(gl.float32, bitcast=True))
    else:
        low = words.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        high = (words >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        return gl.join(low, high)


@gluon.jit
def halves(s, words, bias, FAST: gl.constexpr, LAYOUT: gl.constexpr, YB: gl.constexpr, BY_DISTANCE: gl.constexpr):
    """Return half of the scores plus the biases, which are stored halved; every thread adds the words it has loaded."""
    if bias[0] is None:
        return s * 0.5
    elif BY_DISTANCE:
        return s * 0.5 + gl.convert_layout(_of_distances(words, FAST, YB), LAYOUT)
    elif YB == 128:
        first, second = words
        both = gl.join(_values(first, FAST), _values(second, FAST)).reshape([4, 8, 4, 4, 2, 2, 2, 2])
        return s * 0.5 + gl.convert_layout(both.permute((0, 5, 1, 7, 3, 4, 2, 6)).reshape([64, 128]), LAYOUT)
    else:
        each = _values(words, FAST).reshape([4, 8, 4, YB // 16, 2, 2, 2])
        return s * 0.5 + gl.convert_layout(each.permute((0, 5, 1, 3, 4, 2, 6)).reshape([64, YB]), LAYOUT)
