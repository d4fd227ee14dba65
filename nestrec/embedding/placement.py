"""Whether a table is sharded over ranks or held whole by every rank: what can be, and which crosses in fewer bytes.

Of a table with U rows in a step, n of which a micro-batch of a rank asks for, on R ranks, with N micro-batches in which
rows cross (1 with the window cache), keys of 8 bytes, vectors of w and gradients of g bytes, a rank sends

    sharded      (R - 1) / R  N n (8 + w + g)                 keys to owners, vectors, gradients to owners
    replicated   (R - 1) / R (N n (8 R + g) + U g)            keys to all, gradients to owners, sums to all

so a replicated table is one whose rows all micro-batches use, of vectors wide enough, in several micro-batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nestrec.base.errors import UserError
from nestrec.distributed.topology import Topology
from nestrec.embedding.table import Placement, TableConfig

_KEY_BYTES = 8


@dataclass(frozen=True, slots=True)
class Crossed:
    """Bytes that a rank sends for a table in a step."""

    sharded: float
    replicated: float

    @property
    def fewer(self) -> Placement:
        """In which placement fewer bytes cross."""
        return "replicated" if self.replicated < self.sharded else "sharded"


def bytes_crossed(
    *, vector_bytes: int, gradient_bytes: int, ranks: int, used: float, asked: float, micro_batches: int
) -> Crossed:
    """used: rows of a step over all ranks. asked: of a micro-batch of a rank. micro_batches: in which rows cross."""
    others = (ranks - 1) / ranks
    each = micro_batches * asked
    return Crossed(
        sharded=others * each * (_KEY_BYTES + vector_bytes + gradient_bytes),
        replicated=others * (each * (_KEY_BYTES * ranks + gradient_bytes) + used * gradient_bytes),
    )


def can_be_replicated(table: TableConfig) -> bool:
    """It has a fixed number of rows, in memory."""
    return table.num_rows is not None and table.store.kind != "disk"


def with_placements(tables: Sequence[TableConfig], crossed: Mapping[str, Crossed]) -> tuple[TableConfig, ...]:
    """The tables, those that leave it open as fewer bytes cross. crossed: by table; of what is missing, sharded."""
    found = []
    for table in tables:
        placement = table.placement
        if placement == "auto":
            is_open = can_be_replicated(table) and table.name in crossed
            placement = crossed[table.name].fewer if is_open else "sharded"
        found.append(replace(table, placement=placement))
    return tuple(found)


def check_placements(tables: Sequence[TableConfig], topology: Topology) -> None:
    """Raise a UserError where ranks are laid out in a way that no replicated table goes with."""
    for table in tables:
        if not table.is_replicated:
            continue
        for is_so, what in (
            (topology.num_replicas > 1, "replica groups (ranks.replicas)"),
            (topology.hosts is not None, "exchanges by hosts (ranks.hierarchy)"),
        ):
            if is_so:
                raise UserError(
                    f"does not go with {what}",
                    field=f"tables.{table.name}.placement",
                    value=table.placement,
                    remedy="leave the table sharded, or leave out the other",
                )
