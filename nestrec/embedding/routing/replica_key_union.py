"""The union of the keys of a replica group, and the synchronization of its replicas.

Which rows the holders of a shard have in common business with: the union of their keys (union over replicas).

gradients    The working set of a step is the union of what all holders are asked for; each gradient crosses to the
             other holders after the micro-batch that completes it in its own group.
weights      A step has the keys of its own group. Before an average, the rows that any holder touched since the last
             one join them: they are fetched, averaged and written back, but not updated.

How the copies of a row on the ranks that hold its shard are kept alike: an option, and the exchanges it needs.

gradients    Every holder sends the sums of its own group to the others, and all add them up in order of holder. Every
             copy then makes the same step: as if there were one group. A row crosses once in a step, as soon as the
             last micro-batch that uses it in its group is done: only what the last one completes is waited for.
weights      Every group makes a step of its own with the mean gradient of its own samples; every so many steps the
             copies are replaced by their mean, over all holders, those included that did not touch the row. Moments
             can follow more seldom. Not equal to one group, whatever moment_scale is.

In both only touched rows cross. Holders add in the same order, so that copies are equal to the bit.
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
"""What holders replace by its mean: weights, or weights and moments."""


@config
class ReplicaSyncConfig:
    mode: Literal["gradients", "weights"] = "gradients"
    """gradients are summed over replica groups before each update (exact), or weights are averaged after it"""
    every: Count = 1
    """`weights`: steps from one average to the next; what reads the tables (evaluation, save) also averages"""
    state_every: Count = 1
    """`weights`: moments are averaged with every so-many-th average of the weights"""

    def averaged_at(self, step: int) -> Averaged | None:
        """What is averaged after the update of a step."""
        if self.mode == "gradients" or step % self.every:
            return None
        return "rows" if step % (self.every * self.state_every) == 0 else "weights"

    def averaged_steps(self, step: int) -> range:
        """The steps whose rows may differ between holders in what is averaged after the update of `step`."""
        period = self.every * (self.state_every if self.averaged_at(step) == "rows" else 1)
        return range(max(1, step - period + 1), step + 1)

    def steps_since_average(self, step: int) -> range:
        """The steps up to this one since whole rows were last averaged."""
        return range(step - step % (self.every * self.state_every) + 1, step + 1)


def check_tables_can_differ(tables: Sequence[TableConfig]) -> None:
    """Between two averages groups use different keys: which rows exist may not depend on that, and means are whole."""
    for table in tables:
        if table.is_half:
            raise UserError(
                "a mean of 16-bit copies would be rounded again, and not by chance",
                option=f"tables.{table.name}.dtype",
                value=table.dtype,
                remedy="take replica_sync.mode=gradients, or a table of float32",
            )
        for name, value in table.store.counts_uses.items():
            raise UserError(
                "counts uses of keys, which differ between replica groups while weights are averaged",
                option=f"tables.{table.name}.{name}",
                value=value,
                remedy="take replica_sync.mode=gradients, or a table that keeps every row",
            )


def mean_over_holders(holders: Communicator, values: torch.Tensor) -> torch.Tensor:
    """(n, width) mean over the holders, the same bits on each; copies that are equal stay as they are. Collective.

    Each holder averages a slice of the rows for all of them.
    """
    size = holders.size
    mine = holders.rank
    counts = [len(values) * (r + 1) // size - len(values) * r // size for r in range(size)]
    received = all_to_all_rows(holders, values, counts, [counts[mine]] * size)
    wide = torch.promote_types(values.dtype, torch.float32)
    first, *others = received.to(wide).view(size, counts[mine], values.shape[1])
    difference = torch.zeros_like(first)
    for other in others:
        difference += other - first
    mean = (first + difference * (1 / size)).to(values.dtype)
    return torch.cat(gather_rows_from_all(holders, mean, counts))


def mean_bytes_sent(holders: Communicator, values: torch.Tensor) -> int:
    """Bytes that `mean_over_holders` sends from this rank: its copies of the others' slices, the mean of its own."""
    size = holders.size
    mine = holders.rank
    own = len(values) * (mine + 1) // size - len(values) * mine // size
    return (len(values) - own + own * (size - 1)) * values.shape[1] * values.element_size()


Keys = NDArray[np.int64]
Places = NDArray[np.int32]
_STEPS_AHEAD = 8
"""More steps than any schedule exchanges keys ahead of the one that trains."""


@dataclass(frozen=True, slots=True)
class JoinedKeys:
    """The keys of a batch and table that this shard owns, with those of the other holders."""

    keys: Keys
    moved: Places | None = None
    """Of each key of this rank's own group, in its order, the place among them; none: 0, 1, 2, ..."""
    crossing: list[list[Places]] | None = None
    """[micro_batch][holder] places of the rows whose gradient then crosses to the other holders; none: nothing
    crosses."""
    num_touched: int | None = None
    """Only the first so many rows belong to the batch; none: all."""
    averaged: NDArray[np.int64] | None = None
    """Places of the rows that are averaged after the update, in the same order on every holder."""


class ReplicaKeyUnion:
    """The keys that the holders of a shard use, step by step. Used by the one thread that issues collectives."""

    def __init__(self, sync: ReplicaSyncConfig, holders: Communicator) -> None:
        self._sync = sync
        self._holders = holders
        self._touched: dict[int, list[Keys]] = {}

    def join(
        self, owned: list[Keys], last_micro_batches: list[Places], num_micro_batches: int, step: int
    ) -> list[JoinedKeys]:
        """What the working sets of a step hold, for each table. Collective.

        owned: what this rank's own group asks for. last_micro_batches: for each table and key the micro-batch that
        brings its last gradient.
        """
        if self._sync.mode == "gradients":
            return self._joined_gradients(owned, last_micro_batches, num_micro_batches)
        assert step >= 1, "the step of a batch must be known where weights are averaged"
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

    def is_settled_after(self, step: int) -> bool:
        """Whether no copies can differ after a step."""
        return self._sync.mode == "gradients" or not self._sync.steps_since_average(step)

    def unsettled(self, step: int, num_tables: int) -> list[Keys] | None:
        """For each table the keys whose copies may differ after a step, the same on every holder; none: they cannot.

        Collective unless none.
        """
        if self.is_settled_after(step):
            return None
        none = np.empty(0, np.int64)
        mine = [self._first(none, t, self._sync.steps_since_average(step)) for t in range(num_tables)]
        return [union.keys for union, _ in self._unions(mine)]

    def _joined_gradients(
        self, owned: list[Keys], last_micro_batches: list[Places], num_micro_batches: int
    ) -> list[JoinedKeys]:
        unions = self._unions(owned)
        counts = [np.diff(starts) for _, starts in unions]
        lasts = self._gathered(last_micro_batches, counts) if num_micro_batches > 1 else None
        joined = []
        for t, (union, starts) in enumerate(unions):
            held = np.split(union.inverse, starts[1:-1])
            mine = held[self._holders.rank]
            crossing = (
                [held] if lasts is None else _by_micro_batch(held, [rank[t] for rank in lasts], num_micro_batches)
            )
            joined.append(JoinedKeys(union.keys, mine, crossing))
        return joined

    def _unions(self, keys: list[Keys]) -> list[tuple[UniqueKeys, NDArray[np.int64]]]:
        """For each table the distinct keys of all holders, and where each holder's begin in the sequence."""
        mine = torch.tensor([len(k) for k in keys])
        counts = torch.stack(all_gather_equal(self._holders, mine)).numpy()
        everyone = self._gathered(keys, list(counts.T))
        unions = []
        for t in range(len(keys)):
            starts = np.concatenate([[0], np.cumsum(counts[:, t])])
            unions.append((dedup(np.concatenate([holder[t] for holder in everyone])), starts))
        return unions

    def _gathered(
        self, values: Sequence[NDArray[Any]], counts: Sequence[NDArray[np.int64]]
    ) -> list[list[NDArray[Any]]]:
        """[holder][table] values of all holders; counts: for each table those of the holders."""
        flat = torch.from_numpy(np.concatenate(values))
        of_holders = np.sum(counts, axis=0)
        found = gather_rows_from_all(self._holders, flat, of_holders.tolist())
        cuts = [np.cumsum([c[h] for c in counts])[:-1] for h in range(self._holders.size)]
        return [np.split(piece.numpy(), cut) for piece, cut in zip(found, cuts, strict=True)]

    def _remember(self, step: int, keys: list[Keys]) -> None:
        self._touched[step] = keys
        oldest = step - self._sync.every * self._sync.state_every - _STEPS_AHEAD
        for old in [s for s in self._touched if s < oldest]:
            del self._touched[old]

    def _first(self, keys: Keys, table: int, steps: Sequence[int]) -> Keys:
        """These keys, then those of the given steps that are not among them."""
        older = [self._touched[s][table] for s in steps if s in self._touched]
        if not older:
            return keys
        distinct = np.unique(np.concatenate(older))
        return np.concatenate([keys, distinct[~np.isin(distinct, keys)]])


def _by_micro_batch(held: list[Places], lasts: list[Places], num_micro_batches: int) -> list[list[Places]]:
    return [[places[last == p] for places, last in zip(held, lasts, strict=True)] for p in range(num_micro_batches)]


def _with_averaged(owned: Keys, union: Keys, mine: Places) -> JoinedKeys:
    """The batch's own keys first, then the others of the union; mine: places of the own keys in the union."""
    place = np.full(len(union), -1, np.int64)
    place[mine] = np.arange(len(mine))
    others = np.flatnonzero(place < 0)
    place[others] = np.arange(len(mine), len(union))
    return JoinedKeys(np.concatenate([owned, union[others]]), num_touched=len(mine), averaged=place)
