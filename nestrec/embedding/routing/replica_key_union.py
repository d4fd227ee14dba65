"""Synchronization of replicas in 2D sparse parallelism (replica groups x shards), and the union of their keys.

The replicas of a shard are the ranks that store it, one per replica group. Two modes keep their rows synchronized:

gradients    Every replica sends the gradient sums of its own group to the others, and all sum them in order of replica.
             Every replica then makes the same optimizer step, as if there were a single group. The working set of a
             step is the union of the keys requested from all replicas. The gradient of a row is sent once per step,
             right after the micro-batch that completes it in its group, so that the step waits only for the gradients
             of the last micro-batch.
weights      Every group makes optimizer steps with the mean gradient of its own samples. Every `every_steps` steps the
             replicas of the weights are replaced by their mean, including replicas that did not change the row; moments
             can be averaged less often. A step uses the keys of its own group. Before an average, the rows that any
             replica changed since the previous one are added: they are fetched, averaged and written back, but not
             updated. The results differ from those of a single group for every `moment_scale`.

In both modes only changed rows are exchanged. Replicas sum in the same order, so that they stay bitwise identical.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.base.config_values import Count
from nestrec.base.errors import UserError
from nestrec.distributed.collectives import all_gather_equal, all_to_all_rows, gather_rows_from_all
from nestrec.distributed.topology import Communicator
from nestrec.embedding.table_config import TableConfig
from nestrec.ops.embedding.dedup_host import UniqueKeys, dedup

Averaged = Literal["weights", "rows"]
"""Part of a row that is averaged over the replicas: the weights, or the complete row (weights and moments)."""


@config
class ReplicaSyncConfig:
    mode: Literal["gradients", "weights"] = "gradients"
    """`gradients`: sum gradients over the replica groups before each update (exact); `weights`: average weights after
    it."""
    every_steps: Count = 1
    """Number of steps between averages of the weights (mode `weights`); evaluation and checkpoints also average."""
    state_every_averages: Count = 1
    """Average the moments with every N-th average of the weights (mode `weights`)."""

    def averaged_at(self, step: int) -> Averaged | None:
        """Return the part of the rows that is averaged after the update of a step; None if nothing is."""
        if self.mode == "gradients" or step % self.every_steps:
            return None
        return "rows" if step % (self.every_steps * self.state_every_averages) == 0 else "weights"

    def averaged_steps(self, step: int) -> range:
        """Return the steps whose changes the average after the update of `step` synchronizes."""
        period = self.every_steps * (self.state_every_averages if self.averaged_at(step) == "rows" else 1)
        return range(max(1, step - period + 1), step + 1)

    def steps_since_average(self, step: int) -> range:
        """Return the steps, up to this one, since complete rows were last averaged."""
        return range(step - step % (self.every_steps * self.state_every_averages) + 1, step + 1)


def check_weight_averaging(tables: Sequence[TableConfig]) -> None:
    """Check that the tables support averaging of weights.

    Replica groups use different keys between two averages, so the set of existing rows must not depend on the uses of
    keys, and means must not be rounded.

    Raises:
        UserError: If a table has 16-bit weights, or admits or evicts rows by their uses.
    """
    for table in tables:
        if table.is_half:
            raise UserError(
                "not supported with replica_sync.mode=weights: the mean of 16-bit weights would be rounded again",
                option=f"tables.{table.name}.dtype",
                value=table.dtype,
                remedy="use replica_sync.mode=gradients, or a float32 table",
            )
        for name, value in table.store.usage_dependent_options.items():
            raise UserError(
                "not supported with replica_sync.mode=weights: uses of keys differ between replicas",
                option=f"tables.{table.name}.{name}",
                value=value,
                remedy="use replica_sync.mode=gradients, or a table without admission and eviction",
            )


def mean_over_replicas(replicas: Communicator, values: torch.Tensor) -> torch.Tensor:
    """Return the (n, width) mean over the replicas, bitwise identical on each. Collective.

    Equal values stay unchanged. Each replica averages a slice of the rows for all of them.
    """
    size = replicas.size
    own = replicas.rank
    counts = [len(values) * (r + 1) // size - len(values) * r // size for r in range(size)]
    received = all_to_all_rows(replicas, values, counts, [counts[own]] * size)
    wide = torch.promote_types(values.dtype, torch.float32)
    first, *others = received.to(wide).view(size, counts[own], values.shape[1])
    difference = torch.zeros_like(first)
    for other in others:
        difference += other - first
    mean = (first + difference * (1 / size)).to(values.dtype)
    return torch.cat(gather_rows_from_all(replicas, mean, counts))


def mean_bytes_sent(replicas: Communicator, values: torch.Tensor) -> int:
    """Return the bytes that this rank sends in `mean_over_replicas`: values of other slices, and its own mean."""
    size = replicas.size
    rank = replicas.rank
    own = len(values) * (rank + 1) // size - len(values) * rank // size
    return (len(values) - own + own * (size - 1)) * values.shape[1] * values.element_size()


Keys = NDArray[np.int64]
Indices = NDArray[np.int32]
_STEPS_AHEAD = 8
"""Upper bound on the number of steps by which any schedule exchanges keys ahead of training."""


@dataclass(frozen=True, slots=True)
class JoinedKeys:
    """Keys of a batch and table that this shard owns, joined with those of the other replicas."""

    keys: Keys
    union_indices: Indices | None = None
    """Index in `keys` of each key of this rank's own group, in its order; None means 0, 1, 2, ..."""
    replica_indices: list[list[Indices]] | None = None
    """[micro_batch][replica] indices of the rows whose gradients are then sent to the other replicas; None if gradients
    are not exchanged."""
    num_updated: int | None = None
    """Number of leading rows that belong to the batch; None if all do."""
    averaged: NDArray[np.int64] | None = None
    """Indices of the rows that are averaged after the update, in the same order on every replica."""


class ReplicaKeyUnion:
    """Keys that the replicas of a shard use in each step.

    Not thread-safe: use it from the thread that issues collectives.
    """

    def __init__(self, sync: ReplicaSyncConfig, replicas: Communicator) -> None:
        self._sync = sync
        self._holders = replicas
        self._touched: dict[int, list[Keys]] = {}

    def join(
        self, owned: list[Keys], last_micro_batches: list[Indices], num_micro_batches: int, step: int
    ) -> list[JoinedKeys]:
        """Return the keys of the working set of a step, per table. Collective.

        Args:
            owned: Per table the keys that this rank's own group requests.
            last_micro_batches: Per table the micro-batch with the last gradient of each key.
            num_micro_batches: Number of micro-batches of the batch.
            step: Step of the batch, from 1.
        """
        if self._sync.mode == "gradients":
            return self._joined_gradients(owned, last_micro_batches, num_micro_batches)
        assert step >= 1, "averaging weights requires the step of the batch"
        self._remember(step, owned)
        if self._sync.averaged_at(step) is None:
            return [JoinedKeys(keys) for keys in owned]
        older = [s for s in self._sync.averaged_steps(step) if s != step]
        unions = self._unions([self._first(keys, t, older) for t, keys in enumerate(owned)])
        joined = []
        for keys, (union, starts) in zip(owned, unions, strict=True):
            start = starts[self._holders.rank]
            joined.append(_with_averaged(keys, union.keys, union.inverse[start : start + len(keys)]))
        return joined

    def replicas_synchronized_after(self, step: int) -> bool:
        """Return whether all replicas are equal after a step."""
        return self._sync.mode == "gradients" or not self._sync.steps_since_average(step)

    def unsynchronized_keys(self, step: int, num_tables: int) -> list[Keys] | None:
        """Return per table the keys whose replicas may differ after a step; None if all replicas are equal.

        The keys are the same on every replica. Collective, unless it returns None.
        """
        if self.replicas_synchronized_after(step):
            return None
        none = np.empty(0, np.int64)
        own = [self._first(none, t, self._sync.steps_since_average(step)) for t in range(num_tables)]
        return [union.keys for union, _ in self._unions(own)]

    def _joined_gradients(
        self, owned: list[Keys], last_micro_batches: list[Indices], num_micro_batches: int
    ) -> list[JoinedKeys]:
        unions = self._unions(owned)
        counts = [np.diff(starts) for _, starts in unions]
        lasts = self._gather_values(last_micro_batches, counts) if num_micro_batches > 1 else None
        joined = []
        for t, (union, starts) in enumerate(unions):
            replica_indices_list = np.split(union.inverse, starts[1:-1])
            own = replica_indices_list[self._holders.rank]
            replica_indices = (
                [replica_indices_list]
                if lasts is None
                else _by_micro_batch(replica_indices_list, [rank[t] for rank in lasts], num_micro_batches)
            )
            joined.append(JoinedKeys(union.keys, own, replica_indices))
        return joined

    def _unions(self, keys: list[Keys]) -> list[tuple[UniqueKeys, NDArray[np.int64]]]:
        """Return per table the unique keys of all replicas, and the start of each replica's keys in the sequence."""
        own = torch.tensor([len(k) for k in keys])
        counts = torch.stack(all_gather_equal(self._holders, own)).numpy()
        all_keys = self._gather_values(keys, list(counts.T))
        unions = []
        for t in range(len(keys)):
            starts = np.concatenate([[0], np.cumsum(counts[:, t])])
            unions.append((dedup(np.concatenate([replica[t] for replica in all_keys])), starts))
        return unions

    def _gather_values(
        self, values: Sequence[NDArray[Any]], counts: Sequence[NDArray[np.int64]]
    ) -> list[list[NDArray[Any]]]:
        """Gather [replica][table] values of all replicas; `counts` contains per table the number for each replica."""
        flat = torch.from_numpy(np.concatenate(values))
        of_holders = np.sum(counts, axis=0)
        gathered = gather_rows_from_all(self._holders, flat, of_holders.tolist())
        cuts = [np.cumsum([c[h] for c in counts])[:-1] for h in range(self._holders.size)]
        return [np.split(piece.numpy(), cut) for piece, cut in zip(gathered, cuts, strict=True)]

    def _remember(self, step: int, keys: list[Keys]) -> None:
        self._touched[step] = keys
        oldest = step - self._sync.every_steps * self._sync.state_every_averages - _STEPS_AHEAD
        for old in [s for s in self._touched if s < oldest]:
            del self._touched[old]

    def _first(self, keys: Keys, table: int, steps: Sequence[int]) -> Keys:
        """Return these keys, followed by the other keys used in the given steps."""
        older = [self._touched[s][table] for s in steps if s in self._touched]
        if not older:
            return keys
        distinct = np.unique(np.concatenate(older))
        return np.concatenate([keys, distinct[~np.isin(distinct, keys)]])


def _by_micro_batch(
    replica_indices_list: list[Indices], lasts: list[Indices], num_micro_batches: int
) -> list[list[Indices]]:
    return [
        [indices[last == p] for indices, last in zip(replica_indices_list, lasts, strict=True)]
        for p in range(num_micro_batches)
    ]


def _with_averaged(owned: Keys, union: Keys, own: Indices) -> JoinedKeys:
    """Return the keys of the batch followed by the others of the union.

    Args:
        owned: Keys of the batch.
        union: Keys of all replicas.
        own: Indices of the keys of the batch in the union.
    """
    set_index = np.full(len(union), -1, np.int64)
    set_index[own] = np.arange(len(own))
    others = np.flatnonzero(set_index < 0)
    set_index[others] = np.arange(len(own), len(union))
    return JoinedKeys(np.concatenate([owned, union[others]]), num_updated=len(own), averaged=set_index)
