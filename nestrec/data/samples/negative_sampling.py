"""Negatives of tokens: pure functions of (token key, index of the negative): counter-based randomness.

    uniform      every item of the catalogue alike
    popularity   in proportion to count ** power, by an alias table in integers
    in_batch     the targets of other tokens of the micro-batch: nothing more is looked up (coupled samples)
    groups       the same, but tokens are dealt to groups at random, and a group's tokens meet each other's targets

All draw with replacement and only for tokens that exist: there is no padding. Log-Q correction subtracts
log(N q(i)) from the logit of a drawn item i, so that the expected sum of exponentials is that of as many uniform
draws; a uniform draw itself needs none.

Legend: T tokens of a micro-batch, R negatives of a token, K - 1 other tokens whose negatives it meets too, N items.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.base.random import GOLDEN64, finalise64, fold_array

Keys = NDArray[np.uint64]
_IN_BATCH, _SHARED = 0x1B, 0x5A
"""Tell the draws apart that are made with one token key."""


@dataclass(frozen=True, slots=True)
class SampledNegatives:
    """The negatives of a micro-batch."""

    keys: Mapping[str, NDArray[np.int64]]
    """What must be looked up: `negative` (T, R), unless the negatives are rows of the micro-batch anyway."""
    tensors: Mapping[str, torch.Tensor]
    """`negative_token` (T, R) int32: whose targets they are; `negative_bias` (T, R) float32: log-Q correction.
    Of the items of a catalogue that are known: `target_at` (T,) int64, the place of the target among them.
    Of groups: `group_token` (G, R + 1) int32, -1 behind the last, and `target_bias` (T,) float32."""


class NegativeSampler(Protocol):
    """Draws negatives; no state between calls."""

    def draw(self, key_T: Keys, target_T: NDArray[np.int64]) -> SampledNegatives:
        """For tokens with these keys and targets."""


@dataclass(frozen=True, slots=True)
class UniformSampler:
    num_negatives: int
    num_items: int
    items: NDArray[np.int64] | None = None
    """(num_items,) ids to draw from; none: 1 to num_items"""

    def draw(self, key_T: Keys, target_T: NDArray[np.int64]) -> SampledNegatives:
        ids = uniform_negatives(key_T, self.num_negatives, self.num_items)
        return SampledNegatives({"negative": ids if self.items is None else self.items[ids - 1]}, {})


@dataclass(frozen=True, slots=True)
class FullCatalogSampler:
    """All items that have training events, for a loss over the whole catalogue.

    An item that is only known by its content is never a target: met as a negative in every step, what it is would be
    learnt to be wrong, and nobody would ever be shown it.
    """

    items: NDArray[np.int64]
    """ids, ascending"""

    def draw(self, key_T: Keys, target_T: NDArray[np.int64]) -> SampledNegatives:
        target_at = np.searchsorted(self.items, target_T)
        return SampledNegatives({"catalogue": self.items}, {"target_at": torch.from_numpy(target_at)})


class PopularitySampler:
    """By counts of events; items that were never seen are never drawn."""

    def __init__(self, counts_N: NDArray[np.int64], num_negatives: int, *, power: float, log_q: bool) -> None:
        """counts_N: events of the items 1..N."""
        weight_N = np.where(counts_N > 0, counts_N.astype(np.float64) ** power, 0.0)
        self._num_negatives = num_negatives
        self._accept_N, self._alias_N = _alias_table(weight_N / weight_N.sum())
        self._bias = log_q_bias(weight_N) if log_q else None

    def draw(self, key_T: Keys, target_T: NDArray[np.int64]) -> SampledNegatives:
        ids = 1 + _by_alias(key_T, self._num_negatives, self._accept_N, self._alias_N)
        bias = {} if self._bias is None else {"negative_bias": torch.from_numpy(self._bias[ids - 1])}
        return SampledNegatives({"negative": ids}, bias)


class InBatchSampler:
    """Targets of other tokens. Popular items come more often, which log-Q corrects by their counts."""

    def __init__(self, counts_N: NDArray[np.int64] | None, num_negatives: int) -> None:
        """counts_N: events of the items 1..N; none leaves the logits alone."""
        self._num_negatives = num_negatives
        self._bias = None if counts_N is None else log_q_bias(counts_N.astype(np.float64))

    def draw(self, key_T: Keys, target_T: NDArray[np.int64]) -> SampledNegatives:
        token = other_tokens(fold_array(key_T, np.full(len(key_T), _IN_BATCH)), self._num_negatives, distinct=False)
        tensors = {"negative_token": torch.from_numpy(token)}
        if self._bias is not None:
            tensors["negative_bias"] = torch.from_numpy(self._bias[target_T - 1][token])
        return SampledNegatives({}, tensors)


class GroupSampler:
    """Targets of the other tokens of a group of at most `num_negatives` + 1. Groups follow the order of token keys."""

    def __init__(self, counts_N: NDArray[np.int64] | None, num_negatives: int) -> None:
        """counts_N: events of the items 1..N; none leaves the logits alone."""
        self._size = num_negatives + 1
        self._bias = None if counts_N is None else log_q_bias(counts_N.astype(np.float64))

    def draw(self, key_T: Keys, target_T: NDArray[np.int64]) -> SampledNegatives:
        num_groups = -(-len(key_T) // self._size)
        token_SG = np.full((self._size, num_groups), -1, np.int32)
        # Dealt like cards, so that groups differ by one token at the most.
        token_SG.reshape(-1)[: len(key_T)] = np.argsort(key_T, kind="stable")
        tensors = {"group_token": torch.from_numpy(np.ascontiguousarray(token_SG.T))}
        if self._bias is not None:
            tensors["target_bias"] = torch.from_numpy(self._bias[target_T - 1])
        return SampledNegatives({}, tensors)


def shared_tokens(key_T: Keys, num_others: int) -> NDArray[np.int32]:
    """(T, K - 1) other tokens of the micro-batch, distinct, drawn for each token; fewer where T is too small."""
    others = min(num_others, max(len(key_T) - 1, 0))
    return other_tokens(fold_array(key_T, np.full(len(key_T), _SHARED)), others, distinct=True)


def other_tokens(key_T: Keys, count: int, *, distinct: bool) -> NDArray[np.int32]:
    """(T, count) tokens that are not the token itself; itself where there is no other."""
    return _others(key_T, count, distinct)  # type: ignore[no-any-return]


def uniform_negatives(key_T: Keys, num_negatives: int, num_items: int) -> NDArray[np.int64]:
    """(T, R) item ids in 1..num_items, uniform with replacement; num_items below 2**32."""
    assert 0 < num_items < 1 << 32
    return _uniform(key_T, num_negatives, num_items)  # type: ignore[no-any-return]


def log_q_bias(weight_N: NDArray[np.float64]) -> NDArray[np.float32]:
    """(N,) what is added to the logit of an item drawn in proportion to its weight; 0 for items never drawn."""
    share_N = weight_N / weight_N.sum() * len(weight_N)
    bias_N: NDArray[np.float32] = -np.log(share_N, out=np.zeros_like(share_N), where=share_N > 0).astype(np.float32)
    return bias_N


@njit(cache=True, nogil=True)
def _below(bits, bound):  # type: ignore[no-untyped-def]
    """The high half of 64 bits, multiplied into 0..bound - 1."""
    return np.int64(((bits >> np.uint64(32)) * np.uint64(bound)) >> np.uint64(32))


@njit(cache=True, nogil=True)
def _uniform(key_T, num_negatives, num_items):  # type: ignore[no-untyped-def]
    out = np.empty((key_T.shape[0], num_negatives), dtype=np.int64)
    for t in range(key_T.shape[0]):
        x = key_T[t]
        for r in range(num_negatives):
            x = x + np.uint64(GOLDEN64)
            out[t, r] = 1 + _below(finalise64(x), num_items)
    return out


@njit(cache=True, nogil=True)
def _by_alias(key_T, num_negatives, accept_N, alias_N):  # type: ignore[no-untyped-def]
    """Places 0..N - 1: the high half of a hash chooses a column, the low half one of its two items."""
    out = np.empty((key_T.shape[0], num_negatives), dtype=np.int64)
    for t in range(key_T.shape[0]):
        x = key_T[t]
        for r in range(num_negatives):
            x = x + np.uint64(GOLDEN64)
            bits = finalise64(x)
            column = _below(bits, len(accept_N))
            out[t, r] = column if (bits & np.uint64(0xFFFFFFFF)) < accept_N[column] else alias_N[column]
    return out


@njit(cache=True, nogil=True)
def _alias_table(share_N):  # type: ignore[no-untyped-def]
    """Vose's table: accept_N in 2**-32, and the item taken otherwise."""
    size = len(share_N)
    accept = np.empty(size, np.uint64)
    alias = np.arange(size)
    mass = share_N * size
    stack = np.empty(size, np.int64)
    low = 0
    high = size  # small columns from the left of the stack, large ones from its right
    for i in range(size):
        if mass[i] < 1.0:
            stack[low] = i
            low += 1
        else:
            high -= 1
            stack[high] = i
    while low > 0 and high < size:
        low -= 1
        small, large = stack[low], stack[high]
        accept[small] = np.uint64(mass[small] * 4294967296.0)
        alias[small] = large
        mass[large] -= 1.0 - mass[small]
        if mass[large] < 1.0:
            high += 1
            stack[low] = large
            low += 1
    for place in range(low):
        accept[stack[place]] = np.uint64(4294967296)
    for place in range(high, size):
        accept[stack[place]] = np.uint64(4294967296)
    return accept, alias


@njit(cache=True, nogil=True)
def _others(key_T, count, distinct):  # type: ignore[no-untyped-def]
    size = key_T.shape[0]
    out = np.empty((size, count), dtype=np.int32)
    for t in range(size):
        x = key_T[t]
        for c in range(count):
            while True:
                x = x + np.uint64(GOLDEN64)
                other = (t + 1 + _below(finalise64(x), size - 1)) % size if size > 1 else t
                is_new = True
                for before in range(c if distinct else 0):
                    is_new = is_new and out[t, before] != other
                if is_new:
                    break
            out[t, c] = other
    return out


def negatives_of(
    sampler: NegativeSampler | None, key_T: Keys, target_T: NDArray[np.int64], *, num_items: int, sharing: int
) -> SampledNegatives:
    """What tokens meet beside their targets: what is drawn, and whose draws they share; all items without a sampler."""
    if sampler is None:
        return SampledNegatives({"catalogue": np.arange(1, num_items + 1)}, {})
    drawn = sampler.draw(key_T, target_T)
    if sharing == 1:
        return drawn
    return SampledNegatives(
        drawn.keys, {**drawn.tensors, "shared_token": torch.from_numpy(shared_tokens(key_T, sharing - 1))}
    )
