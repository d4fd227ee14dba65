"""Feature transforms from raw values to model inputs: one definition for preparation, training and serving.

    standard    (x - mean) / scale
    log         (sign(x) log(1 + |x|) - mean) / scale
    quantiles   bucket id of x: 1 + the number of upper bounds below x, at most the number of buckets
    ngrams      hashed ids of a text's words, word n-grams and character n-grams

Parameters are fitted once, on the training subset, when a dataset is prepared, and are stored on the dataset card.
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
"""Hash seeds that keep word n-grams and character n-grams with the same letters apart."""
_EDGE = 0x20
"""Byte that marks both ends of a word in its character n-grams; words never contain a blank."""


@config
class Transform:
    """Transform from a raw value to a model input."""

    kind: TransformKind = "none"
    """Kind of the transform; `none` passes values unchanged."""
    mean: float = 0.0
    """Mean that `standard` and `log` subtract, for `log` after taking the logarithm."""
    scale: float = 1.0
    """Standard deviation that `standard` and `log` divide by; 1 if all values are equal."""
    bounds: tuple[float, ...] = ()
    """Upper bounds of the buckets of `quantiles`, ascending."""
    words: tuple[int, ...] = ()
    """Word n-gram sizes of `ngrams`, such as (1, 2)."""
    characters: tuple[int, ...] = ()
    """Character n-gram sizes of `ngrams`, such as (3, 4); word boundaries count as characters."""
    buckets: int = 0
    """Number of hash buckets of `ngrams`; ids are in 1..buckets - 1."""
    max_ids: int = 0
    """Maximum number of ids per text for `ngrams`; word n-grams come first."""

    def numbers(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """Transform raw numbers to model inputs; NaN stays NaN, and values beyond the float32 range become infinite."""
        raw = values.astype(np.float64)
        if self.kind == "log":
            raw = signed_log(raw)
        if self.kind in ("standard", "log"):
            raw = (raw - self.mean) / self.scale
        with np.errstate(over="ignore"):
            return raw.astype(np.float32)

    def bucket_ids(self, values: NDArray[Any]) -> NDArray[np.int64]:
        """Return bucket ids of raw numbers from 1, 0 for NaN; values outside the fitted range get the nearest one."""
        upper = np.array(self.bounds, dtype=np.float32)
        with np.errstate(over="ignore"):  # infinity is above all bounds, too
            raw = values.astype(np.float32)
        ids = np.minimum(np.searchsorted(upper, raw, side="left"), upper.size - 1) + 1
        return np.where(np.isnan(raw), 0, ids).astype(np.int64)

    def bags(self, texts: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the concatenated hashed ids of the texts, and the number of ids per text (0 if blank or null)."""
        lower = pc.utf8_lower(texts.cast(pa.string()).fill_null(""))
        offsets, data = _bytes_of(lower)
        words, chars = np.array(self.words, np.int64), np.array(self.characters, np.int64)
        ids, counts = _hash_texts(data, offsets, words, chars, self.buckets, self.max_ids)
        return ids, counts


def signed_log(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return sign(x) log(1 + |x|), a logarithm that is defined for all numbers."""
    logs: NDArray[np.float64] = np.sign(values) * np.log1p(np.abs(values))
    return logs


def _bytes_of(column: pa.Array) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, dtype=np.int32)[column.offset : column.offset + len(column) + 1]
    return bounds, np.frombuffer(data, dtype=np.uint8) if data else np.zeros(0, np.uint8)


@njit(cache=True, nogil=True)
def _is_word_byte(byte: int) -> bool:
    """Return whether a byte belongs to a word: ASCII letters and digits, and all bytes of non-ASCII characters."""
    return byte >= 128 or 48 <= byte <= 57 or 97 <= byte <= 122


@njit(cache=True, nogil=True)
def _find_words(data, start, end, first, last):  # type: ignore[no-untyped-def]
    """Fill `first` and `last` with the bounds of the words of a text, and return the number of words."""
    count = 0
    at = start
    while at < end and count < first.size:
        while at < end and not _is_word_byte(data[at]):
            at += 1
        if at == end:
            break
        first[count] = at
        while at < end and _is_word_byte(data[at]):
            at += 1
        last[count] = at
        count += 1
    return count


@njit(cache=True, nogil=True)
def _hash_ngrams(data, first, last, size, buckets, out, capacity):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    """Write the ids of all character n-grams of a word, including its boundary marks, and return their number."""
    width = last - first + 2
    framed = np.full(width, np.uint8(_EDGE))
    starts = np.empty(width + 1, np.int64)
    framed[1:-1] = data[first:last]
    count = 0
    for at in range(width):  # a character starts at each byte that is not a UTF-8 continuation byte
        if framed[at] & 0xC0 != 0x80:
            starts[count] = at
            count += 1
    starts[count] = width
    written = 0
    for start_char in range(count - size + 1):
        if written == capacity:
            break
        h = mix64_jit(np.uint64(_PIECE_SEED))
        for at in range(starts[start_char], starts[start_char + size]):
            h = mix64_jit(h ^ np.uint64(framed[at]))
        out[written] = np.int64(1) + np.int64(h % np.uint64(buckets - 1))
        written += 1
    return written


@njit(cache=True, nogil=True)
def _hash_texts(data, offsets, words, chars, buckets, max_ids):  # type: ignore[no-untyped-def]  # noqa: PLR0917
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
        num_words = _find_words(data, offsets[text], offsets[text + 1], first, last)
        begin = total
        for words_per_id in words:
            for word in range(num_words - words_per_id + 1):
                if total - begin == max_ids:
                    break
                h = mix64_jit(np.uint64(_WORD_SEED))
                for other in range(word, word + words_per_id):
                    for at in range(first[other], last[other]):
                        h = mix64_jit(h ^ np.uint64(data[at]))
                    h = mix64_jit(h ^ np.uint64(_EDGE))
                out[total] = np.int64(1) + np.int64(h % np.uint64(buckets - 1))
                total += 1
        for size in chars:
            for word in range(num_words):
                capacity = max_ids - (total - begin)
                total += _hash_ngrams(
                    data, first[word], last[word], size, buckets, out[total : total + capacity], capacity
                )
        counts[text] = total - begin
    return out[:total].copy(), counts
