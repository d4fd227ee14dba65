"""How the copies of a row on the ranks that hold its shard are kept alike: an option, and the exchanges it needs.

gradients    Every holder sends the sums of its own group to the others, and all add them up in order of holder. Every
             copy then makes the same step: as if there were one group. A row crosses once in a step, as soon as the
             last micro-batch that uses it in its group is done: only what the last one completes is waited for.
weights      Every group makes a step of its own with the mean gradient of its own samples; every so many steps the
             copies are replaced by their mean, over all holders, those included that did not touch the row. Moments
             can follow more seldom. Not equal to one group, whatever moment_scale is.

In both only touched rows cross. Holders add in the same order, so that copies are equal to the bit.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from nestrec.base.bounds import Count
from nestrec.base.config import config
from nestrec.base.errors import UserError
from nestrec.distributed.exchange import all_to_all_rows, gather_rows_from_all
from nestrec.distributed.topology import Communicator
from nestrec.embedding.table import TableConfig

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
                field=f"tables.{table.name}.dtype",
                value=table.dtype,
                remedy="take replica_sync.mode=gradients, or a table of float32",
            )
        for name, value in table.store.counts_uses.items():
            raise UserError(
                "counts uses of keys, which differ between replica groups while weights are averaged",
                field=f"tables.{table.name}.{name}",
                value=value,
                remedy="take replica_sync.mode=gradients, or a table that keeps every row",
            )


def mean_over_holders(holders: Communicator, values: torch.Tensor) -> torch.Tensor:
    """(n, width) mean over the holders, the same bits on each; copies that are equal stay as they are. Collective.

    Each holder averages a slice of the rows for all of them.
    """
    size, mine = holders.size, holders.rank
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
    size, mine = holders.size, holders.rank
    own = len(values) * (mine + 1) // size - len(values) * mine // size
    return (len(values) - own + own * (size - 1)) * values.shape[1] * values.element_size()
