"""Key-centric clustering: assigns the samples of a rank's batch to micro-batches, so that fewer rows are exchanged.

A key is exchanged once per micro-batch that contains it, so samples that share keys should be in the same micro-batch.
With U_i the unique keys of micro-batch i, the exchanges transfer sum |U_i| rows without the window cache. With the
cache, they transfer the unique keys of the batch, whatever the partition, and only |U_1| and |U_N| stay exposed.

name        method
contiguous  in sample order; balances costs and ignores keys
random      in hashed order
by_length   in order of cost
greedy      expensive samples first, each to the micro-batch that has most of its keys (rare keys count more)
refined     greedy, then samples are moved while that saves rows (gains of Fiduccia and Mattheyses, a few passes)
edges       for the window cache: the first and last micro-batch get the samples with the fewest keys for their cost,
            the other samples stay in order

All methods are pure, deterministic functions and take nearly linear time in the number of keys. All balance costs: the
cost of a micro-batch is at most `_SLACK` above the mean, or exceeds it by at most one sample if samples are expensive.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.balance.partition_tools import Groups, groups_of
from nestrec.base.errors import UserError, did_you_mean
from nestrec.base.random import fold_array
from nestrec.ops.embedding.dedup_host import dedup

Clustering = Literal["contiguous", "random", "by_length", "greedy", "refined", "edges"]
_SLACK = 0.02
_PASSES = 4
MAX_MICRO_BATCHES = 64
"""Maximum number of micro-batches: the micro-batches that contain a key are bits of a 64-bit word."""


@dataclass(frozen=True, slots=True)
class SampleKeys:
    """Keys of each sample i: `values[offsets[i] : offsets[i + 1]]`, in any order; keys can repeat."""

    values: NDArray[np.int64]
    offsets: NDArray[np.int64]

    @property
    def num_samples(self) -> int:
        return len(self.offsets) - 1


@dataclass(frozen=True, slots=True)
class Inflation:
    """Number of rows that a partition into micro-batches exchanges."""

    unique: int
    """Number of unique keys of the batch."""
    sent: int
    """Sum of the numbers of unique keys of the micro-batches."""
    first: int
    """Number of unique keys of the first micro-batch."""
    last: int
    """Number of unique keys of the last micro-batch."""

    @property
    def ratio(self) -> float:
        """Ratio of exchanged rows to unique keys."""
        return self.sent / max(1, self.unique)


def cluster(
    name: Clustering, keys: SampleKeys, cost: NDArray[np.float64], num_micro_batches: int, *, seed: int = 0
) -> Groups:
    """Assign the samples of a batch to micro-batches.

    Args:
        name: Clustering method.
        keys: Keys of each sample.
        cost: (B,) cost of each sample.
        num_micro_batches: Number of micro-batches.
        seed: Seed of the method `random`.

    Returns:
        Indices of the samples of each micro-batch, in increasing order; every sample occurs exactly once.
    """
    if not 1 <= num_micro_batches <= MAX_MICRO_BATCHES:
        raise UserError(
            f"must be from 1 to {MAX_MICRO_BATCHES} for clustering", option="micro_batches", value=num_micro_batches
        )
    if name not in _CLUSTERINGS:
        remedy = did_you_mean(name, _CLUSTERINGS)
        raise UserError("unknown clustering", option="pipeline.clustering", value=name, remedy=remedy)
    unique = dedup(keys.values)
    problem = _Problem(unique.inverse, keys.offsets, len(unique.keys), cost.astype(np.float64), num_micro_batches, seed)
    return groups_of(_CLUSTERINGS[name](problem).astype(np.int64), num_micro_batches)


class KeyClustering:
    """Callable that applies a clustering method; the data loader calls it to split a batch."""

    def __init__(self, name: Clustering) -> None:
        self._name = name

    def __call__(
        self, keys: tuple[NDArray[np.int64], NDArray[np.int64]], cost: NDArray[np.float64], num_micro_batches: int
    ) -> Groups:
        return cluster(self._name, SampleKeys(*keys), cost, num_micro_batches)


def inflation(keys: SampleKeys, groups: Groups) -> Inflation:
    """Count the rows that a partition exchanges (reference implementation)."""
    unique_keys = [
        np.unique(np.concatenate([keys.values[keys.offsets[i] : keys.offsets[i + 1]] for i in group]))
        if len(group)
        else np.empty(0, np.int64)
        for group in groups
    ]
    sizes = [len(group_keys) for group_keys in unique_keys]
    return Inflation(len(np.unique(keys.values)), sum(sizes), sizes[0], sizes[-1])


Assignment = NDArray[np.int32]
"""Micro-batch of each sample, (B,)."""


@dataclass(frozen=True, slots=True)
class _Problem:
    key: NDArray[np.int32]
    """Dense key indices of all samples, from 0 to num_keys - 1."""
    offsets: NDArray[np.int64]
    num_keys: int
    cost: NDArray[np.float64]
    num_micro_batches: int
    seed: int

    @property
    def limit(self) -> float:
        """Maximum cost of a micro-batch."""
        return float(self.cost.sum() / self.num_micro_batches * (1 + _SLACK))

    def of(self, samples: NDArray[np.int64], num_micro_batches: int) -> "_Problem":
        """Return the problem of assigning only these samples."""
        sample_keys = [self.key[self.offsets[i] : self.offsets[i + 1]] for i in samples]
        key = np.concatenate(sample_keys) if sample_keys else self.key[:0]
        offsets = np.concatenate([[0], np.cumsum(np.diff(self.offsets)[samples])])
        return _Problem(key, offsets, self.num_keys, self.cost[samples], num_micro_batches, self.seed)


def _contiguous(problem: _Problem) -> Assignment:
    return _split_by_cost(np.arange(len(problem.cost)), problem.cost, problem.num_micro_batches)


def _random(problem: _Problem) -> Assignment:
    hashed = fold_array(problem.seed, np.arange(len(problem.cost)))
    return _split_by_cost(np.argsort(hashed, kind="stable"), problem.cost, problem.num_micro_batches)


def _by_length(problem: _Problem) -> Assignment:
    return _split_by_cost(np.argsort(-problem.cost, kind="stable"), problem.cost, problem.num_micro_batches)


def _greedy(problem: _Problem) -> Assignment:
    order = np.argsort(-problem.cost, kind="stable")
    uses = np.bincount(problem.key, minlength=problem.num_keys)
    micro_batch: Assignment = _assign(
        problem.key, problem.offsets, uses, problem.cost, order, problem.num_micro_batches, problem.limit
    )
    return micro_batch


def _refine(problem: _Problem) -> Assignment:
    micro_batch = _greedy(problem)
    _improve(
        problem.key,
        problem.offsets,
        problem.num_keys,
        problem.cost,
        micro_batch,
        problem.num_micro_batches,
        problem.limit,
        _PASSES,
    )
    return micro_batch


def _edges(problem: _Problem) -> Assignment:
    if problem.num_micro_batches < 3:
        return _refine(problem)
    cost = problem.cost
    uses = np.bincount(problem.key, minlength=problem.num_keys)
    key_share = np.append(1.0 / uses[problem.key], 0.0)  # a key that f samples have counts 1 / f for each of them
    share = np.add.reduceat(key_share, problem.offsets[:-1]) * (np.diff(problem.offsets) > 0)
    order = np.argsort(share / np.maximum(cost, 1e-300), kind="stable")
    edge = np.sort(order[np.cumsum(cost[order]) <= 2 * cost.sum() / problem.num_micro_batches])
    middle = np.setdiff1d(np.arange(len(cost)), edge)
    micro_batch = np.empty(len(cost), np.int32)
    micro_batch[middle] = 1 + _split_by_cost(np.arange(len(middle)), cost[middle], problem.num_micro_batches - 2)
    micro_batch[edge] = np.where(_refine(problem.of(edge, 2)) == 0, 0, problem.num_micro_batches - 1)
    return micro_batch


_CLUSTERINGS = {
    "contiguous": _contiguous,
    "random": _random,
    "by_length": _by_length,
    "greedy": _greedy,
    "refined": _refine,
    "edges": _edges,
}


def _split_by_cost(order: NDArray[np.int64], cost: NDArray[np.float64], num_micro_batches: int) -> Assignment:
    """Split samples into consecutive runs of nearly equal cost, by the middle of each sample's cost interval."""
    ends = np.cumsum(cost[order])
    total = ends[-1] if len(ends) else 0.0
    micro_batch = np.empty(len(order), np.int32)
    middle = (ends - 0.5 * cost[order]) / total if total > 0 else np.arange(len(order)) / max(1, len(order))
    micro_batch[order] = np.minimum((middle * num_micro_batches).astype(np.int32), num_micro_batches - 1)
    return micro_batch


@njit(cache=True, nogil=True)
def _assign(key, offsets, uses, cost, order, num_micro_batches, limit):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    full = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - num_micro_batches)
    holders = np.zeros(len(uses), np.uint64)
    load, score = np.zeros(num_micro_batches), np.zeros(num_micro_batches)
    micro_batch = np.empty(len(order), np.int32)
    for sample in order:
        score[:] = 0.0
        for i in range(offsets[sample], offsets[sample + 1]):
            word = holders[key[i]]
            if word != np.uint64(0) and word != full:  # a key that all micro-batches have does not favor any of them
                weight = 1.0 / uses[key[i]]
                for p in range(num_micro_batches):
                    if (word >> np.uint64(p)) & np.uint64(1):
                        score[p] += weight
        best = -1
        for p in range(num_micro_batches):
            if load[p] + cost[sample] <= limit and (
                best < 0 or score[p] > score[best] or (score[p] == score[best] and load[p] < load[best])
            ):
                best = p
        if best < 0:
            best = int(np.argmin(load))
        micro_batch[sample] = best
        load[best] += cost[sample]
        for i in range(offsets[sample], offsets[sample + 1]):
            holders[key[i]] |= np.uint64(1) << np.uint64(best)
    return micro_batch


@njit(cache=True, nogil=True)
def _improve(key, offsets, num_keys, cost, micro_batch, num_micro_batches, limit, passes):  # type: ignore[no-untyped-def]  # noqa: PLR0917, PLR0912
    """Move each sample to the micro-batch to which it adds the fewest keys; stop after a pass that saves nothing."""
    count = np.zeros((num_keys, num_micro_batches), np.int32)
    load, brings = np.zeros(num_micro_batches), np.zeros(num_micro_batches, np.int64)
    seen = np.full(num_keys, -1, np.int64)
    for sample in range(len(micro_batch)):
        load[micro_batch[sample]] += cost[sample]
        for i in range(offsets[sample], offsets[sample + 1]):
            count[key[i], micro_batch[sample]] += 1
    for turn in range(passes):
        saved = 0
        for sample in range(len(micro_batch)):
            here = micro_batch[sample]
            stamp = turn * len(micro_batch) + sample
            brings[:] = 0
            for i in range(offsets[sample], offsets[sample + 1]):
                k = key[i]
                count[k, here] -= 1
            for i in range(offsets[sample], offsets[sample + 1]):
                k = key[i]
                if seen[k] != stamp:  # count a repeated key of the sample once
                    seen[k] = stamp
                    for p in range(num_micro_batches):
                        if count[k, p] == 0:
                            brings[p] += 1
            best = here
            for p in range(num_micro_batches):
                if brings[p] < brings[best] and load[p] + cost[sample] <= limit:
                    best = p
            saved += brings[here] - brings[best]
            load[here] -= cost[sample]
            load[best] += cost[sample]
            micro_batch[sample] = best
            for i in range(offsets[sample], offsets[sample + 1]):
                count[key[i], best] += 1
        if saved == 0:
            break
