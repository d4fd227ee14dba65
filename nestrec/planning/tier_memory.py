"""Bytes that a plan needs of each tier, and what to do where a tier is short.

Which tables a plan shards over its ranks and which every rank holds whole, and why.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from nestrec.embedding.table_config import Placement, TrafficEstimate, bytes_crossed
from nestrec.planning.cluster_config import GIB, ClusterConfig
from nestrec.planning.hardware_profile import StoreKind
from nestrec.planning.search_space import Candidate
from nestrec.planning.simulator.program_replay import Mesh
from nestrec.planning.workload import Loads, TableLoad, Workload

Tier = Literal["device", "host", "disk"]
DENSE_COPIES = 4
"""weights, gradients, two moments of AdamW"""
DISK_CACHE_PART = 0.05
"""of the rows of a shard that the disk store keeps in host memory"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of one rank in one tier, on the rank that needs most."""

    tables: float = 0.0
    """weights of rows"""
    state: float = 0.0
    """optimiser state of rows"""
    buffers: float = 0.0
    """working sets, gradients of rows, vectors on their way"""
    activations: float = 0.0
    """kept from forward to backward"""
    dense: float = 0.0
    """dense weights, gradients and moments"""
    limit: float = 0.0
    """what there is"""

    @property
    def needed(self) -> float:
        return self.tables + self.state + self.buffers + self.activations + self.dense

    @property
    def missing(self) -> float:
        return max(0.0, self.needed - self.limit)


def memory_of(
    workload: Workload,
    loads: Loads,
    mesh: Mesh,
    cluster: ClusterConfig,
    *,
    store: StoreKind,
    window_cache: bool,
    buffers: int,
) -> dict[Tier, Memory]:
    """store: of the tables that do not stay where they are. buffers: working sets that a schedule holds at a time."""
    longest = float(loads.linear_flops.max()) / max(workload.flops_a_token, 1e-9)
    crossing = (loads.received_bytes + loads.returned_bytes).sum(axis=2) if window_cache else _two_parts(loads)
    working = buffers * loads.row_bytes + loads.gradient_bytes + crossing
    device = {
        "activations": longest * workload.activation_bytes_a_token,
        "dense": DENSE_COPIES * 4.0 * workload.dense_parameters,
        "buffers": float(working.max()),
    }
    host = {"buffers": float(loads.row_bytes.max())}
    disk = dict[str, float]()
    for table in workload.tables:
        kept_in = table.store if table.keeps_store else store
        rows = table.rows * (1.0 if table.placement == "replicated" else 1.0 / mesh.num_shards)
        _add_rows({"device": device, "dram": host, "disk": disk}[kept_in], table, rows)
        if kept_in == "disk":
            _add_rows(host, table, rows * DISK_CACHE_PART)
    return _tiers(cluster, device, host, disk)


def _add_rows(tier: dict[str, float], table: TableLoad, rows: float) -> None:
    tier["tables"] = tier.get("tables", 0.0) + rows * table.weight_bytes
    tier["state"] = tier.get("state", 0.0) + rows * table.state_bytes


def _tiers(
    cluster: ClusterConfig, device: dict[str, float], host: dict[str, float], disk: dict[str, float]
) -> dict[Tier, Memory]:
    own = (cluster.device.memory_gib - cluster.device.reserved_gib) * GIB
    shared = cluster.host.memory_gib * GIB / cluster.host.ranks
    on_disk = Memory(**disk, limit=cluster.host.disk_gib * GIB / cluster.host.ranks)
    if cluster.device.kind == "cpu":  # one memory for both
        both = {name: device.get(name, 0.0) + host.get(name, 0.0) for name in {*device, *host}}
        return {"host": Memory(**both, limit=min(own, shared)), "disk": on_disk}
    return {"device": Memory(**device, limit=own), "host": Memory(**host, limit=shared), "disk": on_disk}


def _two_parts(loads: Loads) -> float:
    """Vectors of two micro-batches and gradients of two."""
    return float(2 * (loads.received_bytes + loads.returned_bytes).max())


@dataclass(frozen=True, slots=True)
class TablePlacement:
    """What becomes of a table."""

    table: str
    placement: Placement
    crossed: TrafficEstimate
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
    free = tier.limit - tier.needed
    found = []
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


def _crossed(workload: Workload, table: TableLoad, ranks: int, micro_batches: int) -> TrafficEstimate:
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
    table: TableLoad, cluster: ClusterConfig, candidate: Candidate, crossed: TrafficEstimate, missing: float
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
