"""Biases of pairs of tokens, for the Hopper attention kernels: words of pair_tiles.py to elements of a tile of scores.

A thread of a matrix instruction owns some elements of a tile. Their words lie side by side in memory, so it loads them
while the product runs, and adds them without moving any.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0917, RUF059

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def tile_of(first_tile, x0, y0, length, REVERSED: gl.constexpr, IS_SQUARE: gl.constexpr):
    """Number of the tile of pairs in which rows from x0 on meet those from y0 on."""
    if REVERSED:
        asks, sees = y0 // 64, x0 // 64
    else:
        asks, sees = x0 // 64, y0 // 64
    if IS_SQUARE:
        return first_tile + asks * ((length + 63) // 64) + sees
    else:
        return first_tile + asks * (asks + 1) // 2 + sees


@gluon.jit
def _load_tile(words, tile, first_chunk, CHUNKS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, CHUNKS, 4], [32, 1, 1], [4, 1, 1], [2, 1, 0])
    thread = gl.arange(0, 128, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    chunk = gl.arange(0, CHUNKS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    return gl.load(words + tile.to(gl.int64) * 2048 + first_chunk * 512 + chunk * 512 + thread * 4 + word)


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
    """Biases of a tile of scores as they lie in memory; nothing where there are none."""
    words, origin, first = bias
    if words is None:
        return 0
    else:
        if not BY_DISTANCE:
            tile = tile_of(first_tile, x0, y0, length, REVERSED, IS_SQUARE)
        elif REVERSED:
            tile = origin + (y0 // 64 - x0 // 64)
        else:
            tile = origin + (x0 // 64 - y0 // 64)
        if YB == 128:
            gl.static_assert(not REVERSED)
            if BY_DISTANCE:
                return _load_tile(words, tile, 0, 4), _load_tile(words, tile - 1, 0, 4)
            else:
                return _load_tile(words, tile, 0, 4), _load_tile(words, tile + 1, 0, 4)
        elif YB == 32:
            return _load_tile(words, tile, y0 // 32 % 2 * 2, 2)
        else:
            return _load_tile(words, tile, 0, 4)


@gluon.jit
def _values(words, FAST: gl.constexpr):
    """(threads, chunks, words, 2) values of bfloat16 (fast), or of float16."""
    if FAST:
        return gl.join((words << 16).to(gl.float32, bitcast=True), words.to(gl.float32, bitcast=True))
    else:
        low = words.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        high = (words >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        return gl.join(low, high)


@gluon.jit
def halves(s, words, bias, FAST: gl.constexpr, LAYOUT: gl.constexpr, YB: gl.constexpr):
    """Half of the scores with their biases, which are kept halved; every thread adds what it has loaded."""
    if bias[0] is None:
        return s * 0.5
    elif YB == 128:
        first, second = words
        both = gl.join(_values(first, FAST), _values(second, FAST)).reshape([4, 8, 4, 4, 2, 2, 2, 2])
        return s * 0.5 + gl.convert_layout(both.permute((0, 5, 1, 7, 3, 4, 2, 6)).reshape([64, 128]), LAYOUT)
    else:
        each = _values(words, FAST).reshape([4, 8, 4, YB // 16, 2, 2, 2])
        return s * 0.5 + gl.convert_layout(each.permute((0, 5, 1, 3, 4, 2, 6)).reshape([64, YB]), LAYOUT)
