"""Search space of the planner: candidates, and the combinations that were tested.

A plan can contain combinations that the authors have only simulated and not run on such devices; `describe_untested`
lists them. The record of what was run is tests/gpu/test_ranks_gpu.py and docs/what-was-run.md.
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
    """One configuration of a recipe that the planner can predict."""

    schedule: ScheduleName = "serial"
    """Pipeline schedule."""
    micro_batches: int = 1
    """Number of micro-batches of a rank's batch."""
    replicas: int = 1
    """Number of replica groups, each of which holds all sharded tables."""
    store: StoreKind = "device"
    """Store of the largest table."""
    policy: str = "fixed"
    """Policy that balances samples over ranks."""
    window_cache: bool = False
    """Send each embedding once per batch instead of once per micro-batch."""
    transport: Transport = "collectives"
    """Transport of the exchanges: NCCL or Gloo collectives, host memory, or peer copies inside one host."""

    def __str__(self) -> str:
        replicas = f", {self.replicas} replicas" if self.replicas > 1 else ""
        cache = ", window cache" if self.window_cache else ""
        transport = f", {self.transport}" if self.transport != "collectives" else ""
        return f"{self.schedule}, N {self.micro_batches}{replicas}, {self.store}, {self.policy}{cache}{transport}"

    def overrides(self) -> dict[str, Any]:
        """Return the options of `nestrec train` for this configuration."""
        options: dict[str, Any] = {
            "pipeline.schedule": self.schedule,
            "batch.num_micro_batches": self.micro_batches,
            "balance.policy": self.policy,
        }
        if self.window_cache:
            options["pipeline.window_cache"] = "true"
        if self.replicas > 1:
            options["parallel.num_replicas"] = self.replicas
        if self.transport != "collectives":
            options["parallel.transport"] = self.transport
        return options


FIELDS = ("schedule", "micro_batches", "replicas", "store", "policy", "window_cache", "transport")


@config
class Space:
    """Values of each option that a search tries; an option that the user has set has a single value."""

    schedules: tuple[ScheduleName, ...] = ()
    """Pipeline schedules; empty: all exact schedules, including those of plugins."""
    micro_batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Numbers of micro-batches of a rank's batch."""
    replicas: tuple[int, ...] = ()
    """Numbers of replica groups; empty: powers of two up to the number of hosts."""
    stores: tuple[StoreKind, ...] = ()
    """Stores of the largest table; empty: all that the cluster has."""
    policies: tuple[str, ...] = ("fixed", "zigzag", "karmarkar_karp")
    """Policies of sample balancing."""
    window_cache: tuple[bool, ...] = (False, True)
    """Values of the window cache option."""
    transports: tuple[Transport, ...] = ()
    """Transports of the exchanges; empty: all that the cluster has."""

    def for_cluster(self, cluster: ClusterConfig, workload: Workload) -> "Space":
        """Return the space with empty fields filled in, without values that this cluster or recipe does not support."""
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
            transports=self.transports or available_transports(cluster),
        )

    def is_sensible(self, candidate: Candidate) -> bool:
        """Return whether no other candidate of this space has the same effect."""
        if candidate.micro_batches > 1:
            return True
        if candidate.window_cache and False in self.window_cache:
            return False
        splits = [SCHEDULES.find(name).splits for name in (candidate.schedule, *self.schedules)]
        return not splits[0] or all(splits)

    def values(self, field: str) -> tuple[Any, ...]:
        """Return the values of a field of `Candidate`."""
        names = {"schedule": "schedules", "store": "stores", "policy": "policies", "transport": "transports"}
        values: tuple[Any, ...] = getattr(self, names.get(field, field))
        return values

    def all_candidates(self) -> Iterator[Candidate]:
        """Yield every combination once."""
        for values in itertools.product(*(self.values(field) for field in FIELDS)):
            candidate = Candidate(**dict(zip(FIELDS, values, strict=True)))
            if self.is_sensible(candidate):
                yield candidate


def available_transports(cluster: ClusterConfig) -> tuple[Transport, ...]:
    """Return the transports of a cluster.

    Peer copies need a single NVLink domain; the host transport needs its bandwidth in the cluster file.
    """
    transports: list[Transport] = ["collectives"]
    if cluster.device.kind == "cuda" and cluster.host.host_copy_gb_per_s > 0:
        transports.append("host")
    if cluster.device.kind == "cuda" and cluster.hosts == 1 and cluster.host.ranks > 1:
        transports.append("copy_engine")
    return tuple(transports)


MAX_TESTED_RANKS = {
    "cpu": {"collectives": 4, "host": 4},
    "cuda": {"collectives": 1, "host": 2, "copy_engine": 1},
}
"""Maximum number of ranks, by device and transport, with which tests compare every schedule with `serial`."""
MAX_TESTED_HOSTS = {"cpu": 4, "cuda": 1}
"""Maximum number of hosts in tests, by device; for CPU ranks each host was a network namespace with its own links."""
TESTED_SCHEDULES = {"serial", "stale", "dual_buffer", "frozen_window", "nested", "priority", "semi_async"}


def describe_untested(candidate: Candidate, cluster: ClusterConfig) -> str | None:
    """Return a description of the parts of a plan that the authors have not run on such devices.

    The result is None if everything was run, possibly with fewer samples.
    """
    kind = cluster.device.kind
    gaps = []
    limit = MAX_TESTED_RANKS[kind].get(candidate.transport, 0)
    if cluster.world > limit:
        gaps.append(f"{candidate.transport} between more than {limit} {kind} rank{'s' if limit != 1 else ''}")
    if cluster.hosts > MAX_TESTED_HOSTS[kind]:
        gaps.append(
            f"{kind} ranks on more than {MAX_TESTED_HOSTS[kind]} host{'s' if MAX_TESTED_HOSTS[kind] != 1 else ''}"
        )
    if candidate.schedule not in TESTED_SCHEDULES:
        gaps.append(f"schedule {candidate.schedule} of a plugin")
    return ", ".join(gaps) or None
