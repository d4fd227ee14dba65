"""Which tables a plan shards over its ranks and which every rank holds whole, and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nestrec.embedding.placement import Crossed, bytes_crossed
from nestrec.embedding.table import Placement
from nestrec.planning.candidate import Candidate
from nestrec.planning.cluster import ClusterConfig
from nestrec.planning.memory import Memory, Tier
from nestrec.planning.workload import TableLoad, Workload


@dataclass(frozen=True, slots=True)
class TablePlacement:
    """What becomes of a table."""

    table: str
    placement: Placement
    crossed: Crossed
    why: str
    is_given: bool = False
    """not chosen by the plan"""

    @property
    def row(self) -> dict[str, Any]:
        """For people."""
        return {
            "table": self.table,
            "placement": self.placement,
            "sharded": round(self.crossed.sharded / 1e3, 2),
            "replicated": round(self.crossed.replicated / 1e3, 2),
            "why": self.why,
        }


def placements_of(
    workload: Workload, cluster: ClusterConfig, candidate: Candidate, memory: Mapping[Tier, Memory]
) -> list[TablePlacement]:
    """Of every table under one plan. memory: what it needs of each tier."""
    tier = memory["host" if candidate.store == "dram" or "device" not in memory else "device"]
    free, found = tier.limit - tier.needed, []
    for table in workload.tables:
        crossed = _crossed(workload, table, cluster.world, 1 if candidate.window_cache else candidate.micro_batches)
        if table.placement is not None:
            found.append(TablePlacement(table.name, table.placement, crossed, "given", is_given=True))
            continue
        more = table.rows * table.row_bytes * (1 - 1 / cluster.world)
        why = _why_sharded(table, cluster, candidate, crossed, more - free)
        if why is None:
            free -= more
        told = why or f"fewer bytes cross; {more / 1e6:,.2f} MB more memory a rank"
        found.append(TablePlacement(table.name, "sharded" if why else "replicated", crossed, told))
    return found


def options_of(placements: Sequence[TablePlacement]) -> dict[str, str]:
    """Options of `nestrec train` that make it so."""
    chosen = [p.table for p in placements if p.placement == "replicated" and not p.is_given]
    return {f"tables.{table}.placement": "replicated" for table in chosen}


def _crossed(workload: Workload, table: TableLoad, ranks: int, micro_batches: int) -> Crossed:
    keys = workload.batch_samples * workload.mean_length * table.keys_a_token
    used, asked = table.distinct(np.array([keys, keys / (ranks * micro_batches)])).tolist()
    return bytes_crossed(
        vector_bytes=table.weight_bytes,
        gradient_bytes=table.gradient_bytes,
        ranks=ranks,
        used=used,
        asked=asked,
        micro_batches=micro_batches,
    )


def _why_sharded(
    table: TableLoad, cluster: ClusterConfig, candidate: Candidate, crossed: Crossed, missing: float
) -> str | None:
    """None where it had better be replicated."""
    if cluster.world == 1:
        return "there is one rank"
    if candidate.replicas > 1:
        return "replica groups hold copies of shards"
    if not table.has_fixed_rows:
        return "it has no fixed number of rows"
    if (table.store if table.keeps_store else candidate.store) == "disk":
        return "it is kept on disk"
    if crossed.fewer == "sharded":
        return "fewer bytes cross"
    return f"the memory of a rank is short by {missing:,.0f} bytes" if missing > 0 else None
