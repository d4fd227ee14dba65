"""Memory of a plan by tier (device, host, disk), and the placement of tables: sharded or replicated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from nestrec.embedding.table_config import Placement, TrafficEstimate, estimate_traffic
from nestrec.planning.cluster_config import GIB, ClusterConfig
from nestrec.planning.hardware_profile import StoreKind
from nestrec.planning.search_space import Candidate
from nestrec.planning.simulator.program_replay import Mesh
from nestrec.planning.workload import Loads, TableLoad, Workload

Tier = Literal["device", "host", "disk"]
DENSE_COPIES = 4
"""Number of float32 copies of the dense weights: weights, gradients and the two moments of AdamW."""
DISK_CACHE_PART = 0.05
"""Fraction of the rows of a shard that the disk store caches in host memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of one memory tier, on the rank that needs most."""

    tables: float = 0.0
    """Bytes of the embedding weights."""
    state: float = 0.0
    """Bytes of the optimizer state of rows."""
    buffers: float = 0.0
    """Bytes of working sets, row gradients, and embeddings in transfer."""
    activations: float = 0.0
    """Bytes of the activations that are saved for the backward pass."""
    dense: float = 0.0
    """Bytes of dense weights, gradients and moments."""
    limit: float = 0.0
    """Available bytes."""

    @property
    def needed(self) -> float:
        """Required bytes."""
        return self.tables + self.state + self.buffers + self.activations + self.dense

    @property
    def missing(self) -> float:
        """Required bytes beyond the limit."""
        return max(0.0, self.needed - self.limit)


def estimate_memory(
    workload: Workload,
    loads: Loads,
    mesh: Mesh,
    cluster: ClusterConfig,
    *,
    store: StoreKind,
    window_cache: bool,
    buffers: int,
) -> dict[Tier, Memory]:
    """Estimate the memory of a plan by tier.

    Args:
        workload: The recipe.
        loads: Work of each rank.
        mesh: Device mesh.
        cluster: The cluster.
        store: Store of the tables whose store the plan can choose.
        window_cache: Whether the embeddings of a whole batch are buffered.
        buffers: Maximum number of working sets that the schedule holds at once.
    """
    longest = float(loads.linear_flops.max()) / max(workload.flops_per_token, 1e-9)
    in_transfer = (loads.received_bytes + loads.returned_bytes).sum(axis=2) if window_cache else _two_parts(loads)
    working = buffers * loads.row_bytes + loads.gradient_bytes + in_transfer
    device = {
        "activations": longest * workload.activation_bytes_per_token,
        "dense": DENSE_COPIES * 4.0 * workload.dense_parameters,
        "buffers": float(working.max()),
    }
    host = {"buffers": float(loads.row_bytes.max())}
    disk = dict[str, float]()
    for table in workload.tables:
        tier = table.store if table.keeps_store else store
        rows = table.rows * (1.0 if table.placement == "replicated" else 1.0 / mesh.num_shards)
        _add_rows({"device": device, "dram": host, "disk": disk}[tier], table, rows)
        if tier == "disk":
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
    if cluster.device.kind == "cpu":  # device and host share one memory
        both = {name: device.get(name, 0.0) + host.get(name, 0.0) for name in {*device, *host}}
        return {"host": Memory(**both, limit=min(own, shared)), "disk": on_disk}
    return {"device": Memory(**device, limit=own), "host": Memory(**host, limit=shared), "disk": on_disk}


def _two_parts(loads: Loads) -> float:
    """Return the bytes of the embeddings and gradients of two micro-batches, which are in transfer at once."""
    return float(2 * (loads.received_bytes + loads.returned_bytes).max())


@dataclass(frozen=True, slots=True)
class TablePlacement:
    """Placement of one table, with the reason."""

    table: str
    placement: Placement
    traffic: TrafficEstimate
    """Bytes per step if the table is sharded, and if it is replicated."""
    why: str
    is_fixed: bool = False
    """Whether the user has set the placement."""

    @property
    def row(self) -> dict[str, Any]:
        """Row of the printed table, in KB per rank and step."""
        return {
            "table": self.table,
            "placement": self.placement,
            "sharded": round(self.traffic.sharded / 1e3, 2),
            "replicated": round(self.traffic.replicated / 1e3, 2),
            "why": self.why,
        }


def choose_placements(
    workload: Workload, cluster: ClusterConfig, candidate: Candidate, memory: Mapping[Tier, Memory]
) -> list[TablePlacement]:
    """Choose the placement of every table under one plan.

    A table is replicated if that transfers fewer bytes and fits into memory.

    Args:
        workload: The recipe.
        cluster: The cluster.
        candidate: The plan.
        memory: Memory by tier that the plan needs with sharded tables.
    """
    tier = memory["host" if candidate.store == "dram" or "device" not in memory else "device"]
    free = tier.limit - tier.needed
    result = []
    for table in workload.tables:
        traffic = _traffic(workload, table, cluster.world, 1 if candidate.window_cache else candidate.micro_batches)
        if table.placement is not None:
            result.append(TablePlacement(table.name, table.placement, traffic, "set by the user", is_fixed=True))
            continue
        more = table.rows * table.row_bytes * (1 - 1 / cluster.world)
        why = _why_sharded(table, cluster, candidate, traffic, more - free)
        if why is None:
            free -= more
        reason = why or f"transfers fewer bytes; {more / 1e6:,.2f} MB more memory per rank"
        result.append(TablePlacement(table.name, "sharded" if why else "replicated", traffic, reason))
    return result


def placement_options(placements: Sequence[TablePlacement]) -> dict[str, str]:
    """Return the options of `nestrec train` for placements that the plan has chosen."""
    replicated = [p.table for p in placements if p.placement == "replicated" and not p.is_fixed]
    return {f"tables.{table}.placement": "replicated" for table in replicated}


def _traffic(workload: Workload, table: TableLoad, ranks: int, micro_batches: int) -> TrafficEstimate:
    keys = workload.batch_samples * workload.mean_length * table.keys_per_token
    used, requested = table.distinct(np.array([keys, keys / (ranks * micro_batches)])).tolist()
    return estimate_traffic(
        vector_bytes=table.weight_bytes,
        gradient_bytes=table.gradient_bytes,
        ranks=ranks,
        used_rows=used,
        requested_rows=requested,
        micro_batches=micro_batches,
    )


def _why_sharded(
    table: TableLoad, cluster: ClusterConfig, candidate: Candidate, traffic: TrafficEstimate, missing: float
) -> str | None:
    """Return why a table should be sharded; None if it should be replicated."""
    if cluster.world == 1:
        return "only one rank"
    if candidate.replicas > 1:
        return "replica groups already hold copies of shards"
    if not table.has_fixed_rows:
        return "no fixed number of rows"
    if (table.store if table.keeps_store else candidate.store) == "disk":
        return "stored on disk"
    if traffic.cheaper_placement == "sharded":
        return "transfers fewer bytes"
    return f"the memory of a rank is short by {missing:,.0f} bytes" if missing > 0 else None
