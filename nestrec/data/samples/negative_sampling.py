"""Negative sampling with counter-based randomness: negatives are pure functions of (token key, index of the negative).

    uniform      every item of the catalog with equal probability
    popularity   in proportion to count ** power, by an alias table in integers
    in_batch     the targets of other tokens of the micro-batch: no additional lookups (coupled samples)
    groups       like in_batch, but tokens are randomly partitioned into groups and use the targets of their group

All samplers draw with replacement, and only for real tokens: there is no padding. Log-Q correction subtracts log(N
q(i)) from the logit of a drawn item i, so that the expected sum of exponentials equals that of the same number of
uniform draws; uniform draws need no correction.

Legend: T tokens of a micro-batch, R negatives of a token, K - 1 other tokens whose negatives it shares, N items.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.base.random import GOLDEN64, finalize64, fold_array

Keys = NDArray[np.uint64]
_IN_BATCH, _SHARED = 0x1B, 0x5A
"""Seeds that keep the draws for different purposes apart, which use the same token key."""


@dataclass(frozen=True, slots=True)
class SampledNegatives:
    """Negatives of a micro-batch."""

    keys: Mapping[str, NDArray[np.int64]]
    """Keys that must be looked up: `negative` (T, R); empty if the negatives are already in the micro-batch."""
    tensors: Mapping[str, torch.Tensor]
    """Tensors for the loss. `negative_token` (T, R) int32: the token whose target is the negative. `negative_bias` (T,
    R) float32: log-Q correction. With a catalog of known items, `target_at` (T,) int64: index of the target among them.
    With groups, `group_token` (G, R + 1) int32: tokens of each group, padded with -1, and `target_bias` (T,) float32.
    """


class NegativeSampler(Protocol):
    """Draws negatives. Stateless."""

    def draw(self, key_T: Keys, target_T: NDArray[np.int64]) -> SampledNegatives:
        """Draw negatives for tokens with these random generator keys and targets."""


@dataclass(frozen=True, slots=True)
class UniformSampler:
    """Draws items of the catalog with equal probability."""

    num_negatives: int
    num_items: int
    items: NDArray[np.int64] | None = None
    """(num_items,) item ids to draw from; None draws from 1..num_items."""

    def draw(self, key_T: Keys, target_T: NDArray[np.int64]) -> SampledNegatives:
        ids = uniform_negatives(key_T, self.num_negatives, self.num_items)
        return SampledNegatives({"negative": ids if self.items is None else self.items[ids - 1]}, {})


@dataclass(frozen=True, slots=True)
class FullCatalogSampler:
    """Uses all items that have training events as negatives, for a softmax loss over the full catalog.

    A cold-start item, known only by its features, is never a target. As a negative in every step it would be trained
    down and never be recommended.
    """

    items: NDArray[np.int64]
    """Item ids, ascending."""

    def draw(self, key_T: Keys, target_T: NDArray[np.int64]) -> SampledNegatives:
        target_at = np.searchsorted(self.items, target_T)
        return SampledNegatives({"catalog": self.items}, {"target_at": torch.from_numpy(target_at)})


class PopularitySampler:
    """Draws items by their event counts; items without events are never drawn.

    Args:
        counts_N: (N,) event counts of the items 1..N.
        num_negatives: Number of negatives per token.
        power: Exponent of the counts.
        log_q: Whether to apply log-Q correction.
    """

    def __init__(self, counts_N: NDArray[np.int64], num_negatives: int, *, power: float, log_q: bool) -> None:
        weight_N = np.where(counts_N > 0, counts_N.astype(np.float64) ** power, 0.0)
        self._num_negatives = num_negatives
        self._accept_N, self._alias_N = _alias_table(weight_N / weight_N.sum())
        self._bias = log_q_bias(weight_N) if log_q else None

    def draw(self, key_T: Keys, target_T: NDArray[np.int64]) -> SampledNegatives:
        ids = 1 + _by_alias(key_T, self._num_negatives, self._accept_N, self._alias_N)
        bias = {} if self._bias is None else {"negative_bias": torch.from_numpy(self._bias[ids - 1])}
        return SampledNegatives({"negative": ids}, bias)


class InBatchSampler:
    """Uses the targets of other tokens in the micro-batch. Log-Q correction compensates for their popularity bias.

    Args:
        counts_N: (N,) event counts of the items 1..N; None disables log-Q correction.
        num_negatives: Number of negatives per token.
    """

    def __init__(self, counts_N: NDArray[np.int64] | None, num_negatives: int) -> None:
        self._num_negatives = num_negatives
        self._bias = None if counts_N is None else log_q_bias(counts_N.astype(np.float64))

    def draw(self, key_T: Keys, target_T: NDArray[np.int64]) -> SampledNegatives:
        token = other_tokens(fold_array(key_T, np.full(len(key_T), _IN_BATCH)), self._num_negatives, distinct=False)
        tensors = {"negative_token": torch.from_numpy(token)}
        if self._bias is not None:
            tensors["negative_bias"] = torch.from_numpy(self._bias[target_T - 1][token])
        return SampledNegatives({}, tensors)


class GroupSampler:
    """Uses the targets of the other tokens in a group of at most `num_negatives` + 1 tokens, grouped by token key.

    Args:
        counts_N: (N,) event counts of the items 1..N; None disables log-Q correction.
        num_negatives: Maximum number of negatives per token.
    """

    def __init__(self, counts_N: NDArray[np.int64] | None, num_negatives: int) -> None:
        self._size = num_negatives + 1
        self._bias = None if counts_N is None else log_q_bias(counts_N.astype(np.float64))

    def draw(self, key_T: Keys, target_T: NDArray[np.int64]) -> SampledNegatives:
        num_groups = -(-len(key_T) // self._size)
        token_SG = np.full((self._size, num_groups), -1, np.int32)
        # Assign tokens round-robin, so that group sizes differ by at most one.
        token_SG.reshape(-1)[: len(key_T)] = np.argsort(key_T, kind="stable")
        tensors = {"group_token": torch.from_numpy(np.ascontiguousarray(token_SG.T))}
        if self._bias is not None:
            tensors["target_bias"] = torch.from_numpy(self._bias[target_T - 1])
        return SampledNegatives({}, tensors)


def shared_tokens(key_T: Keys, num_others: int) -> NDArray[np.int32]:
    """Return (T, K - 1) distinct other tokens of the micro-batch for each token; fewer columns if T is too small."""
    others = min(num_others, max(len(key_T) - 1, 0))
    return other_tokens(fold_array(key_T, np.full(len(key_T), _SHARED)), others, distinct=True)


def other_tokens(key_T: Keys, count: int, *, distinct: bool) -> NDArray[np.int32]:
    """Return (T, count) tokens that differ from the token itself; the token itself if it is the only one."""
    return _others(key_T, count, distinct)  # type: ignore[no-any-return]


def uniform_negatives(key_T: Keys, num_negatives: int, num_items: int) -> NDArray[np.int64]:
    """Return (T, R) item ids in 1..num_items, uniform with replacement; num_items must be below 2**32."""
    assert 0 < num_items < 1 << 32
    return _uniform(key_T, num_negatives, num_items)  # type: ignore[no-any-return]


def log_q_bias(weight_N: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return (N,) terms to add to the logits of items drawn in proportion to their weights; 0 for items never drawn."""
    share_N = weight_N / weight_N.sum() * len(weight_N)
    bias_N: NDArray[np.float32] = -np.log(share_N, out=np.zeros_like(share_N), where=share_N > 0).astype(np.float32)
    return bias_N


@njit(cache=True, nogil=True)
def _scale_to_range(bits, bound):  # type: ignore[no-untyped-def]
    """Map the high half of 64 random bits to 0..bound - 1."""
    return np.int64(((bits >> np.uint64(32)) * np.uint64(bound)) >> np.uint64(32))


@njit(cache=True, nogil=True)
def _uniform(key_T, num_negatives, num_items):  # type: ignore[no-untyped-def]
    out = np.empty((key_T.shape[0], num_negatives), dtype=np.int64)
    for t in range(key_T.shape[0]):
        x = key_T[t]
        for r in range(num_negatives):
            x = x + np.uint64(GOLDEN64)
            out[t, r] = 1 + _scale_to_range(finalize64(x), num_items)
    return out


@njit(cache=True, nogil=True)
def _by_alias(key_T, num_negatives, accept_N, alias_N):  # type: ignore[no-untyped-def]
    """Draw indices 0..N - 1: the high half of a hash selects a column, the low half one of its two items."""
    out = np.empty((key_T.shape[0], num_negatives), dtype=np.int64)
    for t in range(key_T.shape[0]):
        x = key_T[t]
        for r in range(num_negatives):
            x = x + np.uint64(GOLDEN64)
            bits = finalize64(x)
            column = _scale_to_range(bits, len(accept_N))
            out[t, r] = column if (bits & np.uint64(0xFFFFFFFF)) < accept_N[column] else alias_N[column]
    return out


@njit(cache=True, nogil=True)
def _alias_table(share_N):  # type: ignore[no-untyped-def]
    """Build Vose's alias table: acceptance thresholds in units of 2**-32, and the alternative item of each column."""
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
    for i_left in range(low):
        accept[stack[i_left]] = np.uint64(4294967296)
    for i_left in range(high, size):
        accept[stack[i_left]] = np.uint64(4294967296)
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
                other = (t + 1 + _scale_to_range(finalize64(x), size - 1)) % size if size > 1 else t
                is_new = True
                for before in range(c if distinct else 0):
                    is_new = is_new and out[t, before] != other
                if is_new:
                    break
            out[t, c] = other
    return out


def sample_negatives(
    sampler: NegativeSampler | None, key_T: Keys, target_T: NDArray[np.int64], *, num_items: int, logit_sharing: int
) -> SampledNegatives:
    """Draw negatives, and the tokens whose negatives are shared; without a sampler, use the full catalog."""
    if sampler is None:
        return SampledNegatives({"catalog": np.arange(1, num_items + 1)}, {})
    negatives = sampler.draw(key_T, target_T)
    if logit_sharing == 1:
        return negatives
    return SampledNegatives(
        negatives.keys, {**negatives.tensors, "shared_token": torch.from_numpy(shared_tokens(key_T, logit_sharing - 1))}
    )
