"""Bytes that a plan needs of each tier, and what to do where a tier is short."""

from dataclasses import dataclass
from typing import Literal

from nestrec.planning.cluster import GIB, ClusterConfig
from nestrec.planning.loads import Loads
from nestrec.planning.profile import StoreKind
from nestrec.planning.simulator.replay import Mesh
from nestrec.planning.workload import TableLoad, Workload

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
    host, disk = {"buffers": float(loads.row_bytes.max())}, dict[str, float]()
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
