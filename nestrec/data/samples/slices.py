"""Cutting slices out of concatenated rows, vectorised."""

import numpy as np
from numpy.typing import NDArray

from nestrec.base.random import fold, fold_array


def slice_index(first: NDArray[np.int64], end: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(T,) index of every element of the slices [first, end), one after the other, and (B + 1,) their offsets."""
    lengths = end - first
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], lengths), offsets


def positions(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """(T,) position inside its row, from 0."""
    return np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))


def sample_keys(seed: int, epoch: int, sample_ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """(B,) keys of the counter-based generator for (run seed, epoch, sample id)."""
    return fold_array(fold(seed, epoch), sample_ids)


def token_keys(sample_key: NDArray[np.uint64], offsets: NDArray[np.int64]) -> NDArray[np.uint64]:
    """(T,) keys of the tokens: the sample's key folded with the position of the token."""
    return fold_array(np.repeat(sample_key, np.diff(offsets)), positions(offsets))
