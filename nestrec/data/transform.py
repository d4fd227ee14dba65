"""From a raw value to what a model reads: one definition for preparation, training and serving.

    standard    (x - mean) / scale
    log         (sign(x) log(1 + |x|) - mean) / scale
    quantiles   the id of the bucket in which x lies: 1 + the number of upper bounds below x, the last one at most
    ngrams      a text as the hashed ids of its words, runs of words and pieces of words

Parameters are learnt on the training part alone, once, when a dataset is prepared, and stand on its card.
"""

from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numba import njit
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.base.random import mix64_jit

TransformKind = Literal["none", "standard", "log", "quantiles", "ngrams"]
_WORD_SEED, _PIECE_SEED = 0x77, 0x63
"""Tell a run of words from a piece of a word that has the same letters."""
_EDGE = 0x20
"""Stands before and behind a word in its pieces; no word holds a blank."""


@config
class Transform:
    """How a raw value becomes what models read."""

    kind: TransformKind = "none"
    """`none`: as it is."""
    mean: float = 0.0
    """Of `standard`, or of `log` behind the logarithm."""
    scale: float = 1.0
    """Standard deviation of the same; 1 where all values are equal."""
    bounds: tuple[float, ...] = ()
    """Upper bounds of the buckets of `quantiles`, ascending."""
    words: tuple[int, ...] = ()
    """Of `ngrams`: how many words in a row make an id, such as (1, 2)."""
    characters: tuple[int, ...] = ()
    """Of `ngrams`: how many characters of a word, its ends marked, make an id, such as (3, 4)."""
    buckets: int = 0
    """Of `ngrams`: ids lie in 1..buckets - 1."""
    max_ids: int = 0
    """Of `ngrams`: the most ids of a text; words come first."""

    def numbers(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """What a model reads of raw numbers; NaN stays NaN, and what does not fit into 32 bits is infinite."""
        raw = values.astype(np.float64)
        if self.kind == "log":
            raw = squashed(raw)
        if self.kind in ("standard", "log"):
            raw = (raw - self.mean) / self.scale
        with np.errstate(over="ignore"):
            return raw.astype(np.float32)

    def bucket_ids(self, values: NDArray[Any]) -> NDArray[np.int64]:
        """Buckets of raw numbers from 1; 0 for NaN. A value beyond all that were seen lies in the nearest bucket."""
        upper = np.array(self.bounds, dtype=np.float32)
        with np.errstate(over="ignore"):  # beyond all bounds as well
            raw = values.astype(np.float32)
        ids = np.minimum(np.searchsorted(upper, raw, side="left"), upper.size - 1) + 1
        return np.where(np.isnan(raw), 0, ids).astype(np.int64)

    def bags(self, texts: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Hashed ids of each text one after the other, and how many each has; none for a blank or a null."""
        lower = pc.utf8_lower(texts.cast(pa.string()).fill_null(""))
        offsets, data = _bytes_of(lower)
        words, pieces = np.array(self.words, np.int64), np.array(self.characters, np.int64)
        ids, counts = _hash_texts(data, offsets, words, pieces, self.buckets, self.max_ids)
        return ids, counts


def squashed(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """sign(x) log(1 + |x|): a logarithm that takes every number."""
    logs: NDArray[np.float64] = np.sign(values) * np.log1p(np.abs(values))
    return logs


def _bytes_of(column: pa.Array) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, dtype=np.int32)[column.offset : column.offset + len(column) + 1]
    return bounds, np.frombuffer(data, dtype=np.uint8) if data else np.zeros(0, np.uint8)


@njit(cache=True, nogil=True)
def _is_of_word(byte: int) -> bool:
    """Letters and digits of ASCII, and every byte of any other character."""
    return byte >= 128 or 48 <= byte <= 57 or 97 <= byte <= 122


@njit(cache=True, nogil=True)
def _words_of(data, start, end, first, last):  # type: ignore[no-untyped-def]
    """Fill the bounds of the words of a text; their number."""
    count = 0
    at = start
    while at < end and count < first.size:
        while at < end and not _is_of_word(data[at]):
            at += 1
        if at == end:
            break
        first[count] = at
        while at < end and _is_of_word(data[at]):
            at += 1
        last[count] = at
        count += 1
    return count


@njit(cache=True, nogil=True)
def _hash_pieces(data, first, last, size, buckets, out, room):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    """Ids of all runs of `size` characters of a word between two edges; how many were written."""
    width = last - first + 2
    framed = np.full(width, np.uint8(_EDGE))
    starts = np.empty(width + 1, np.int64)
    framed[1:-1] = data[first:last]
    count = 0
    for at in range(width):  # a character begins where no continuation byte of UTF-8 stands
        if framed[at] & 0xC0 != 0x80:
            starts[count] = at
            count += 1
    starts[count] = width
    written = 0
    for begin in range(count - size + 1):
        if written == room:
            break
        h = mix64_jit(np.uint64(_PIECE_SEED))
        for at in range(starts[begin], starts[begin + size]):
            h = mix64_jit(h ^ np.uint64(framed[at]))
        out[written] = np.int64(1) + np.int64(h % np.uint64(buckets - 1))
        written += 1
    return written


@njit(cache=True, nogil=True)
def _hash_texts(data, offsets, words, pieces, buckets, max_ids):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    num_texts = offsets.size - 1
    counts = np.zeros(num_texts, np.int64)
    out = np.empty(max(1024, num_texts * 8), np.int64)
    first = np.empty(max_ids, np.int64)
    last = np.empty(max_ids, np.int64)
    total = 0
    for text in range(num_texts):
        if total + max_ids > out.size:
            grown = np.empty(2 * out.size + max_ids, np.int64)
            grown[:total] = out[:total]
            out = grown
        num_words = _words_of(data, offsets[text], offsets[text + 1], first, last)
        begin = total
        for run in words:
            for word in range(num_words - run + 1):
                if total - begin == max_ids:
                    break
                h = mix64_jit(np.uint64(_WORD_SEED))
                for other in range(word, word + run):
                    for at in range(first[other], last[other]):
                        h = mix64_jit(h ^ np.uint64(data[at]))
                    h = mix64_jit(h ^ np.uint64(_EDGE))
                out[total] = np.int64(1) + np.int64(h % np.uint64(buckets - 1))
                total += 1
        for size in pieces:
            for word in range(num_words):
                room = max_ids - (total - begin)
                total += _hash_pieces(data, first[word], last[word], size, buckets, out[total : total + room], room)
        counts[text] = total - begin
    return out[:total].copy(), counts
