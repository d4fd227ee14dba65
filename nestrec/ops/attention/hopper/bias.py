"""Biases of the distance and of the time between tokens, for the Hopper attention kernels.

A thread of a matrix instruction owns some elements of a tile of scores. Their time buckets lie side by side in memory
(bucket_tiles.py), so it loads them at once and looks their values up; the value of a distance it looks up by place.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0917, RUF059

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nestrec.ops.attention.hopper.pieces import ROWS, places


@gluon.jit
def load_buckets(first_tile, x0, y0, length, bias, REVERSED: gl.constexpr, IS_SQUARE: gl.constexpr, YB: gl.constexpr):
    """Time buckets of a tile of pairs as they lie in memory, four to a word; nothing where there is no time table."""
    position_table, centre, time_table, tiles, first = bias
    if time_table is None:
        return 0
    else:
        WORDS: gl.constexpr = min(YB, 64) // 8
        layout: gl.constexpr = gl.BlockedLayout([1, WORDS], [32, 1], [4, 1], [1, 0])
        if REVERSED:
            asks, sees = y0 // 64, x0 // 64
        else:
            asks, sees = x0 // 64, y0 // 64
        if IS_SQUARE:
            tile = first_tile + asks * ((length + 63) // 64) + sees
        else:
            tile = first_tile + asks * (asks + 1) // 2 + sees
        thread = gl.arange(0, 128, gl.SliceLayout(1, layout))
        word = gl.arange(0, WORDS, gl.SliceLayout(0, layout))
        place = tiles + tile.to(gl.int64) * 1024 + (thread * 8)[:, None] + word[None, :]
        if YB == 32:
            place += y0 // 32 % 2 * 4
        if YB == 128:
            gl.static_assert(not REVERSED)
            return gl.load(place), gl.load(place + 1024)
        else:
            return gl.load(place)


@gluon.jit
def _bytes(words):
    """(threads, words, 2, 2): rows 8 apart, and neighbouring columns."""
    return gl.join(
        gl.join(words & 255, (words >> 16) & 255), gl.join((words >> 8) & 255, (words >> 24) & 255)
    )  # fmt: skip


@gluon.jit
def _buckets(words, LAYOUT: gl.constexpr, YB: gl.constexpr):
    """As a tile; every thread keeps what it has loaded."""
    if YB == 128:
        first, second = words
        both = gl.join(_bytes(first), _bytes(second)).reshape([4, 8, 4, 8, 2, 2, 2])
        return gl.convert_layout(both.permute((0, 4, 1, 6, 3, 2, 5)).reshape([64, 128]), LAYOUT)
    else:
        each = _bytes(words).reshape([4, 8, 4, YB // 8, 2, 2])
        return gl.convert_layout(each.permute((0, 4, 1, 3, 2, 5)).reshape([64, YB]), LAYOUT)


@gluon.jit
def add_bias(s, words, x0, y0, history, rules, bias, REVERSED: gl.constexpr, HAS_RULES: gl.constexpr,
             LAYOUT: gl.constexpr, YB: gl.constexpr):  # fmt: skip
    """Scores with the bias of the distance and of the time between tokens.

    Tables are padded: rows behind the end of a sequence, whose results are dropped, may stand further apart than
    tables reach, and their buckets may be any byte.
    """
    position_table, centre, time_table, tiles, first_tile = bias
    if time_table is not None:
        s += gl.load(time_table + _buckets(words, LAYOUT, YB)).to(gl.float32)
    if position_table is not None:
        targets, num_context, window = rules
        if targets is None:
            row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
            column = gl.arange(0, YB, gl.SliceLayout(0, LAYOUT))[None, :]
            if REVERSED:
                place = position_table + (centre + x0 - y0) + row - column
            else:
                place = position_table + (centre + y0 - x0) - row + column
            s += gl.load(place).to(gl.float32)
        else:
            i, j = places(x0, y0, LAYOUT, REVERSED, YB)
            distance = gl.minimum(j, history) - gl.minimum(i, history)
            s += gl.load(position_table + (distance + centre)).to(gl.float32)
    return s
