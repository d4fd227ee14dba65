"""Search space of the planner: candidates, and the combinations that were tested.

What a planner chooses between.

Which combinations of a plan have been run by us on that kind of device, and which have only been reckoned with.

Tests are the record (tests/gpu/test_ranks_gpu.py), and docs/what-was-run.md. A plan may still name what has not been
run, and says so.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from nestrec.base.config import config
from nestrec.pipeline.schedule_spec import SCHEDULES, ScheduleName
from nestrec.planning.cluster_config import ClusterConfig
from nestrec.planning.hardware_profile import StoreKind
from nestrec.planning.workload import Workload

Transport = Literal["collectives", "host", "copy_engine"]


@config
class Candidate:
    """One way to run a recipe."""

    schedule: ScheduleName = "serial"
    """how stages share the time"""
    micro_batches: int = 1
    """parts of a rank's batch"""
    replicas: int = 1
    """copies of the tables"""
    store: StoreKind = "device"
    """where the rows of the largest table are kept"""
    policy: str = "fixed"
    """balance of samples over ranks"""
    window_cache: bool = False
    """a row crosses once a batch, not once a micro-batch"""
    transport: Transport = "collectives"
    """how exchanges cross: NCCL or Gloo, host memory, peer copies inside one host"""

    def __str__(self) -> str:
        replicas = f", {self.replicas} replicas" if self.replicas > 1 else ""
        cache = ", window cache" if self.window_cache else ""
        transport = f", {self.transport}" if self.transport != "collectives" else ""
        return f"{self.schedule}, N {self.micro_batches}{replicas}, {self.store}, {self.policy}{cache}{transport}"

    def overrides(self) -> dict[str, Any]:
        """Options of `nestrec train` that make it so."""
        found: dict[str, Any] = {
            "pipeline.schedule": self.schedule,
            "batch.micro_batches": self.micro_batches,
            "balance.policy": self.policy,
        }
        if self.window_cache:
            found["pipeline.window_cache"] = "true"
        if self.replicas > 1:
            found["ranks.replicas"] = self.replicas
        if self.transport != "collectives":
            found["ranks.exchange"] = self.transport
        return found


FIELDS = ("schedule", "micro_batches", "replicas", "store", "policy", "window_cache", "transport")


@config
class Space:
    """The values that are tried; a single one is what the user has given."""

    schedules: tuple[ScheduleName, ...] = ()
    """how stages share the time; none: all whose result equals serial's, those of other packages too"""
    micro_batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """parts of a rank's batch"""
    replicas: tuple[int, ...] = ()
    """copies of the tables; none: powers of two up to the number of hosts"""
    stores: tuple[StoreKind, ...] = ()
    """tiers for rows of the largest table; none: those that the cluster has"""
    policies: tuple[str, ...] = ("fixed", "zigzag", "karmarkar_karp")
    """of balance"""
    window_cache: tuple[bool, ...] = (False, True)
    """without and with"""
    transports: tuple[Transport, ...] = ()
    """of exchanges; none: those that the cluster has"""

    def on(self, cluster: ClusterConfig, workload: Workload) -> "Space":
        """What makes sense on this cluster and for this recipe."""
        copies = [
            2**k for k in range(cluster.world.bit_length()) if cluster.world % 2**k == 0 and 2**k <= cluster.hosts
        ]
        stores: list[StoreKind] = ["device"] if cluster.device.kind == "cpu" else ["device", "dram"]
        on_disk = all(table.keeps_store or table.placement != "replicated" for table in workload.tables)
        stores += ["disk"] if on_disk and cluster.host.disk_gib > 0 else []
        samples = workload.batch_samples // cluster.world
        parts = tuple(n for n in self.micro_batches if n == 1 or (n <= samples and workload.may_be_cut))
        return replace(
            self,
            schedules=self.schedules or tuple(name for name in SCHEDULES if SCHEDULES.find(name).is_exact),
            replicas=self.replicas or tuple(copies),
            stores=self.stores or tuple(stores),
            micro_batches=parts or self.micro_batches,
            transports=self.transports or transports_of(cluster),
        )

    def is_sensible(self, candidate: Candidate) -> bool:
        """Not the same as another candidate, which is in this space, under another name."""
        if candidate.micro_batches > 1:
            return True
        if candidate.window_cache and False in self.window_cache:
            return False
        splits = [SCHEDULES.find(name).splits for name in (candidate.schedule, *self.schedules)]
        return not splits[0] or all(splits)

    def values(self, field: str) -> tuple[Any, ...]:
        names = {"schedule": "schedules", "store": "stores", "policy": "policies", "transport": "transports"}
        found: tuple[Any, ...] = getattr(self, names.get(field, field))
        return found

    def everything(self) -> Iterator[Candidate]:
        """All combinations, once each."""
        for values in itertools.product(*(self.values(field) for field in FIELDS)):
            candidate = Candidate(**dict(zip(FIELDS, values, strict=True)))
            if self.is_sensible(candidate):
                yield candidate


def transports_of(cluster: ClusterConfig) -> tuple[Transport, ...]:
    """Peer copies need one NVLink domain, a way through the host a host that is told of."""
    found: list[Transport] = ["collectives"]
    if cluster.device.kind == "cuda" and cluster.host.copy_gb_per_s > 0:
        found.append("host")
    if cluster.device.kind == "cuda" and cluster.hosts == 1 and cluster.host.ranks > 1:
        found.append("copy_engine")
    return tuple(found)


MOST_RANKS = {
    "cpu": {"collectives": 4, "host": 4},
    "cuda": {"collectives": 1, "host": 2, "copy_engine": 1},
}
"""Device to transport to the most ranks with which every schedule has been compared with `serial`."""
MOST_HOSTS = {"cpu": 4, "cuda": 1}
"""Of CPU ranks each host was a network namespace with links of its own."""
TESTED_SCHEDULES = {"serial", "stale", "dual_buffer", "frozen_window", "nested", "priority", "semi_async"}


def untested(candidate: Candidate, cluster: ClusterConfig) -> str | None:
    """What of a plan nobody has run yet on such devices; none: all of it was, if on fewer samples."""
    kind = cluster.device.kind
    found = []
    most = MOST_RANKS[kind].get(candidate.transport, 0)
    if cluster.world > most:
        found.append(f"{candidate.transport} between more than {most} {kind} rank{'s' if most != 1 else ''}")
    if cluster.hosts > MOST_HOSTS[kind]:
        found.append(f"{kind} ranks on more than {MOST_HOSTS[kind]} host{'s' if MOST_HOSTS[kind] != 1 else ''}")
    if candidate.schedule not in TESTED_SCHEDULES:
        found.append(f"schedule {candidate.schedule}, of another package")
    return ", ".join(found) or None
