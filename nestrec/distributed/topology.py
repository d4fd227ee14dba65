"""Device mesh of a run: topology, process groups and the options of parallelism.

`Topology` is the only owner of ranks and process groups. The ranks form a mesh of replica groups x shards (2D sparse
parallelism). The ranks of one replica group divide the rows of the sharded tables among them; ranks with the same shard
index in different groups hold copies of the same rows. The replica layout determines which of the two are adjacent:

    shards_contiguous      rank = replica * num_shards + shard      all-to-alls of a group stay within a host
    replicas_contiguous    rank = shard * num_replicas + replica    copies of a row are synchronized within a host
"""

import contextlib
import gc
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from nestrec.base.config import config
from nestrec.base.config_values import Count, Positive
from nestrec.base.errors import UserError
from nestrec.base.process import destroy_process_groups, destroy_process_groups_at_exit, has_process_groups
from nestrec.distributed.collective_watchdog import CollectiveWatchdog
from nestrec.distributed.rendezvous import open_store, watch_rendezvous
from nestrec.distributed.transports import (
    CollectiveTransport,
    CopyEngineTransport,
    DeviceStagedTransport,
    HostStagedTransport,
    SharedMemoryTransport,
    Transport,
)
from nestrec.trace.tracer import CollectiveLog

Placement = Literal["shards_contiguous", "replicas_contiguous"]
ExchangeKind = Literal["auto", "collectives", "host", "copy_engine", "shared_memory"]


@config
class ParallelConfig:
    """Options of parallelism: replica groups, transports, dense parallelism and context parallelism."""

    num_replicas: Count = 1
    """Number of replica groups, each of which holds all rows; must divide the number of ranks. All-to-alls of vectors
    stay within a group; `replica_sync` controls how copies of a row are synchronized.
    """
    replica_layout: Placement = "shards_contiguous"
    """Ranks that form a replica group: `shards_contiguous` takes consecutive ranks (all-to-alls stay within a host),
    `replicas_contiguous` takes every `num_replicas`-th rank (the copies of a row are within a host).
    """
    transport: ExchangeKind = "auto"
    """Transport of vectors and gradients between devices: `collectives` (NCCL or Gloo), `host` (pinned host memory and
    Gloo, for any network), `copy_engine` (peer copies within one NVLink domain) or `shared_memory` (between CPU ranks
    of one host; also carries keys). `auto` uses `shared_memory` if all ranks are on CPUs of one host, `host` if several
    ranks share a device (which NCCL does not support), and otherwise `collectives`.
    """
    hierarchical_all_to_all: bool = False
    """Whether rows cross the network once per host instead of once per rank that requests them. Each rank requests rows
    on behalf of its host, which sums the gradients before it sends them. Every host needs the same number of ranks of a
    replica group. Results equal those without this option up to rounding; schedules still match `serial` as documented.
    """
    dense: Literal["replicated", "fsdp"] = "replicated"
    """Parallelism of dense weights: `replicated` keeps all of them on every rank (data parallel); `fsdp` shards the
    weights, gradients, optimizer states and running averages of the encoder layers over the ranks with PyTorch's
    `fully_shard`. Results are equal up to rounding. `fsdp` requires GPUs and the serial schedule.
    """
    grad_bucket_mib: Positive = 25.0
    """Approximate size in MiB of the buckets in which dense gradients are all-reduced, last layers first. Another size
    changes results only by rounding.
    """
    overlap_grad_reduce: bool = True
    """Whether the all-reduce of a bucket starts as soon as the backward pass of the last micro-batch has produced its
    gradients, while the pass continues. The last bucket never overlaps. Results are bitwise identical.
    """
    context_parallel: Count = 1
    """Number of consecutive ranks that share every sequence (context parallelism): each holds a part of its tokens, for
    histories that do not fit on one device. Must divide the number of ranks. Samples are assigned to groups of this
    size.
    """


Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class Communicator:
    """Process group for one kind of traffic, with its transport and its log of collectives."""

    name: str
    rank: int
    """Index of this process within the group."""
    size: int
    group: dist.ProcessGroup | None
    """Process group; None if this process is alone in it, and then nothing is sent."""
    log: CollectiveLog = field(repr=False)
    transport: Transport | None = field(default=None, repr=False)
    """Transport of its tensors; defaults to the collectives of the group. None if `group` is None."""
    watchdog: CollectiveWatchdog | None = field(default=None, repr=False)
    """Watchdog for collectives that the host does not wait for; None if there are none."""

    def __post_init__(self) -> None:
        if self.transport is None and self.group is not None:
            object.__setattr__(self, "transport", CollectiveTransport(self.group))


@dataclass(frozen=True, slots=True)
class HostGroup:
    """Replica group as a grid of hosts x ranks per host, for the hierarchical all-to-all.

    Every host has the same number of ranks of the group. Shard s is on host s // ranks_per_host, as its local rank s %
    ranks_per_host. A rank sends its requests for shard s to the local rank s % ranks_per_host of its own host, which
    forwards them for the whole host. So only ranks with the same local rank communicate between hosts.
    """

    ranks_per_host: int
    """Number of ranks of the replica group on each host."""
    keys_within: Communicator
    """Ranks of the replica group on this host; carries keys."""
    vectors_within: Communicator
    """Ranks of the replica group on this host; carries vectors and their gradients."""
    keys_between: Communicator
    """Ranks with the local rank of this rank on all hosts of the replica group; carries keys."""
    vectors_between: Communicator
    """Ranks with the local rank of this rank on all hosts of the replica group; carries vectors and their gradients."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Rank, device mesh and communicators of this process."""

    rank: int
    """Index of this process among all ranks, from 0."""
    world: int
    """Number of ranks."""
    num_replicas: int
    """Number of replica groups (`parallel.num_replicas`)."""
    placement: Placement
    """Layout of the replica groups (`parallel.replica_layout`)."""
    device: torch.device
    """Device of this rank."""
    keys: Communicator
    """Shards of this replica group; carries keys, which are host tensors."""
    vectors: Communicator
    """Shards of this replica group; carries vectors and their gradients."""
    replica_keys: Communicator
    """Ranks with copies of this shard; carries keys, which are host tensors."""
    replicas: Communicator
    """Ranks with copies of this shard; carries gradients of rows."""
    dense: Communicator
    """All ranks; carries dense gradients."""
    control: Communicator
    """All ranks; carries small host messages."""
    samples: Communicator
    """All ranks; carries samples of later batches between hosts. One thread of the data stages issues its collectives,
    concurrently with the thread that issues those of the steps. It therefore has a separate log and a separate Gloo
    group that other collectives do not wait for.
    """
    groups: Communicator
    """One rank of each context group, with the same part of the tokens as this rank; carries samples, as `samples`
    does, between the context groups to which they are assigned. Without context parallelism it is `samples`.
    """
    context: Communicator
    """Ranks of this context group, which hold parts of the same sequences; carries attention keys and values."""
    log: CollectiveLog = field(repr=False)
    hosts: HostGroup | None = None
    """Communicators of the hierarchical all-to-all; None if every rank of a replica group communicates with every
    other.
    """
    options: ParallelConfig = field(default_factory=ParallelConfig)
    """Options from which the topology was created."""
    extra_groups: list[dist.ProcessGroup] = field(default_factory=list, repr=False, compare=False)
    """Process groups that other modules created for these ranks; they are destroyed with those of the communicators."""

    @property
    def num_shards(self) -> int:
        """Number of shards of each sharded table: the ranks per replica group."""
        return self.world // self.num_replicas

    @property
    def shard(self) -> int:
        """Index of the shard that this rank holds."""
        return next(s for s, ranks in enumerate(self.replica_axis) if self.rank in ranks)

    @property
    def replica(self) -> int:
        """Index of the replica group of this rank."""
        return next(r for r, ranks in enumerate(self.shard_axis) if self.rank in ranks)

    @property
    def shard_axis(self) -> list[list[int]]:
        """Ranks of each replica group, in order of shard."""
        return mesh(self.world, self.num_replicas, self.placement)

    @property
    def replica_axis(self) -> list[list[int]]:
        """Ranks that hold each shard, in order of replica group."""
        return [list(ranks) for ranks in zip(*self.shard_axis, strict=True)]

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @staticmethod
    @contextlib.contextmanager
    def scoped(make: "Callable[[], Topology]") -> "Iterator[Topology]":
        """Create a topology with `make` and destroy its process groups when the block ends.

        The groups are destroyed on errors too: if only this rank fails, its peers notice at once, and all ranks can run
        a new rendezvous. A default process group that existed before the block remains.
        """
        had_process_groups = has_process_groups()
        topology = None
        try:
            topology = make()
            yield topology
        finally:
            if not had_process_groups:
                destroy_process_groups()
            elif topology is not None:
                destroy_process_groups(topology._own_groups())

    def _own_groups(self) -> list[dist.ProcessGroup]:
        """Return the process groups that were created for this topology."""
        owned = [getattr(self, each.name) for each in fields(self)]
        owned += [] if self.hosts is None else [getattr(self.hosts, each.name) for each in fields(self.hosts)]
        groups = [one.group for one in owned if isinstance(one, Communicator) and one.group is not None]
        groups += self.extra_groups
        return list({id(group): group for group in groups}.values())

    @staticmethod
    def single(device: torch.device | str = "cpu") -> "Topology":
        """Return the topology of a single process without process groups."""
        log = CollectiveLog()
        target = torch.device(device)
        if str(target) == "cuda":  # the current device is per thread, so other threads need its index
            target = torch.device("cuda", torch.cuda.current_device())

        def local_communicator(name: str) -> Communicator:
            return Communicator(name, 0, 1, None, log)

        samples = Communicator("samples", 0, 1, None, CollectiveLog())
        return Topology(
            rank=0,
            world=1,
            num_replicas=1,
            placement="shards_contiguous",
            device=target,
            keys=local_communicator("keys"),
            vectors=local_communicator("vectors"),
            replica_keys=local_communicator("replica_keys"),
            replicas=local_communicator("replicas"),
            dense=local_communicator("dense"),
            control=local_communicator("control"),
            samples=samples,
            groups=samples,
            context=local_communicator("context"),
            log=log,
        )

    @staticmethod
    def from_environment(
        device: str = "cpu", ranks: ParallelConfig | None = None, *, timeout_s: float = 300.0
    ) -> "Topology":
        """Create the topology that the environment variables of torchrun describe; without them, a single process.

        Args:
            device: `cpu` (Gloo) or `cuda` (NCCL, on the device of LOCAL_RANK).
            ranks: Options of parallelism.
            timeout_s: Time without a response after which a peer counts as lost, in seconds.
        """
        world = int(os.environ.get("WORLD_SIZE", "1"))
        target = torch.device(device)
        check_device(target)
        if device == "cuda":  # if there are more local ranks than devices, several ranks share a device
            target = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        if target.type == "cuda":
            torch.cuda.set_device(target)
        if world == 1:
            _check_groups(ranks or ParallelConfig(), 1)
            return Topology.single(target)
        with watch_rendezvous():
            if not dist.is_initialized():
                gc.collect()  # objects of a failed start may hold its process groups, in which other ranks may wait
                store, rank, size = open_store(timeout_s)
                timeout = timedelta(seconds=timeout_s)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
                destroy_process_groups_at_exit()
            return Topology.of_process_group(target, ranks, timeout_s=timeout_s)

    @staticmethod
    def of_process_group(
        device: torch.device,
        ranks: ParallelConfig | None = None,
        *,
        timeout_s: float = 300.0,
        groups_of_one: bool = False,
    ) -> "Topology":
        """Create the topology over the ranks of the default process group. Collective.

        Args:
            device: Device of this rank.
            ranks: Options of parallelism.
            timeout_s: Time without a response after which a peer counts as lost, in seconds.
            groups_of_one: Whether groups of a single rank use collectives too, so that one device can run the code of
                many ranks (for tests and benchmarks).
        """
        cfg = ranks or ParallelConfig()
        rank = dist.get_rank()
        world = dist.get_world_size()
        _check_groups(cfg, world)
        shard_axis = mesh(world, cfg.num_replicas, cfg.replica_layout)
        replica_axis = [list(holders) for holders in zip(*shard_axis, strict=True)]
        all_ranks = [list(range(world))]
        log = CollectiveLog()
        make = _group_maker(rank, device, timedelta(seconds=timeout_s), log, min_ranks=1 if groups_of_one else 2)
        vector_transport = _resolve_transport(cfg, device)
        host_transport: ExchangeKind = vector_transport if device.type == "cpu" else "host"
        # If vectors use device collectives, keys do too, so that no collective of a step uses Gloo.
        key_transport: ExchangeKind = vector_transport if vector_transport == "collectives" else host_transport
        # Peer copies implement the all-to-all only. If ranks share a device, all-reduces go through the host.
        dense_transport: ExchangeKind = "host" if _shares_device(device) else "collectives"
        samples = replace(make("samples", all_ranks, host_transport), log=CollectiveLog())
        context_axis = mesh(world, world // cfg.context_parallel, "shards_contiguous")
        return Topology(
            rank=rank,
            world=world,
            num_replicas=cfg.num_replicas,
            placement=cfg.replica_layout,
            device=device,
            log=log,
            keys=make("keys", shard_axis, key_transport, carries_host_tensors=True),
            vectors=make("vectors", shard_axis, vector_transport),
            replica_keys=make("replica_keys", replica_axis, key_transport, carries_host_tensors=True),
            replicas=make("replicas", replica_axis, vector_transport),
            dense=make("dense", all_ranks, dense_transport),
            control=make("control", all_ranks, "host"),
            samples=samples,
            groups=samples
            if cfg.context_parallel == 1
            else _between_groups(context_axis, make, host_transport, samples),
            context=Communicator("context", 0, 1, None, log)
            if cfg.context_parallel == 1
            else make("context", context_axis, vector_transport),
            hosts=_hosts(cfg, shard_axis, make, vector_transport, key_transport),
            options=cfg,
        )


def mesh(world: int, num_replicas: int, placement: Placement) -> list[list[int]]:
    """Return the ranks of each replica group, in order of shard."""
    shards = world // num_replicas
    if placement == "shards_contiguous":
        return [list(range(r * shards, (r + 1) * shards)) for r in range(num_replicas)]
    return [list(range(r, world, num_replicas)) for r in range(num_replicas)]


def groups_by_host(shard_axis: list[list[int]], ranks_per_host: int) -> tuple[list[list[int]], list[list[int]]]:
    """Split replica groups by host.

    Returns:
        The ranks of each replica group on each host, and the ranks with the same local rank on all hosts of a group.
    """
    within, between = [], []
    for group in shard_axis:
        hosts = [list(ranks) for _, ranks in itertools.groupby(group, lambda rank: rank // ranks_per_host)]
        if len({len(ranks) for ranks in hosts}) > 1:
            raise UserError(
                f"the hosts have different numbers of ranks of a replica group ({[len(ranks) for ranks in hosts]})",
                option="parallel.hierarchical_all_to_all",
                value=True,
                remedy="start the same number of ranks on every host, or remove --parallel.hierarchical_all_to_all",
            )
        within += hosts
        between += [list(ranks) for ranks in zip(*hosts, strict=True)]
    return within, between


def _hosts(
    ranks: ParallelConfig,
    shard_axis: list[list[int]],
    make: "_CommunicatorFactory",
    vector_transport: ExchangeKind,
    key_transport: ExchangeKind,
) -> HostGroup | None:
    """Create the communicators of the hierarchical all-to-all.

    Returns None if it is disabled or useless: a group is on one host, or has one rank on each host.
    """
    if not ranks.hierarchical_all_to_all:
        return None
    world = sum(len(group) for group in shard_axis)
    within, between = groups_by_host(shard_axis, int(os.environ.get("LOCAL_WORLD_SIZE", str(world))))
    if len(within[0]) == 1 or len(between[0]) == 1:
        return None
    return HostGroup(
        ranks_per_host=len(within[0]),
        keys_within=make("keys_within", within, key_transport, carries_host_tensors=True),
        vectors_within=make("vectors_within", within, vector_transport),
        keys_between=make("keys_between", between, key_transport, carries_host_tensors=True),
        vectors_between=make("vectors_between", between, vector_transport),
    )


def check_device(device: torch.device | str, option: str = "device") -> None:
    """Raise a UserError if a CUDA device is requested and PyTorch does not find one."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        remedy = "use cpu, or run `nestrec doctor`"
        raise UserError("PyTorch does not find a CUDA device", option=option, value=str(device), remedy=remedy)


def _between_groups(
    context_axis: list[list[int]], make: "_CommunicatorFactory", kind: ExchangeKind, samples: Communicator
) -> Communicator:
    columns = [list(ranks) for ranks in zip(*context_axis, strict=True)]
    return replace(make("groups", columns, kind), log=samples.log)


def _check_groups(ranks: ParallelConfig, world: int) -> None:
    for name in ("num_replicas", "context_parallel"):
        if world % (value := getattr(ranks, name)):
            remedy = f"choose a divisor of {world}"
            raise UserError("must divide the number of ranks", option=f"parallel.{name}", value=value, remedy=remedy)


def _shares_device(device: torch.device) -> bool:
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return device.type == "cuda" and ranks_here > torch.cuda.device_count()


def _resolve_transport(ranks: ParallelConfig, device: torch.device) -> ExchangeKind:
    """Return the transport with `auto` resolved as far as possible; raise if the device does not support it."""
    is_shared = _shares_device(device)
    if device.type == "cpu" and ranks.transport == "auto":
        return "auto"  # resolved per process group, once its ranks are connected
    if ranks.transport == "auto":
        return "host" if is_shared else "collectives"
    if ranks.transport == "collectives" and is_shared:
        remedy = "set --parallel.transport=host or copy_engine, or start one rank per device"
        raise UserError(
            "NCCL requires one device per rank", option="parallel.transport", value="collectives", remedy=remedy
        )
    if ranks.transport == "copy_engine":
        _check_peers(device)
        os.environ.setdefault(
            "TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"
        )  # copies do not need multicast, and the setup is faster without it
        if is_shared:
            os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    if ranks.transport == "shared_memory" and device.type != "cpu":
        raise UserError(
            "shared memory is available for CPU ranks only",
            option="parallel.transport",
            value="shared_memory",
            remedy="set --parallel.transport=host",
        )
    return ranks.transport


def _check_peers(device: torch.device) -> None:
    """Raise a UserError unless symmetric memory is possible: CUDA devices, and all ranks on one host."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type != "cuda" or ranks_here != dist.get_world_size():
        raise UserError(
            "copies between devices require CUDA and all ranks on one host",
            option="parallel.transport",
            value="copy_engine",
            remedy="set --parallel.transport=host or collectives",
        )


class _CommunicatorFactory(Protocol):
    def __call__(
        self, name: str, axis: list[list[int]], kind: ExchangeKind, *, carries_host_tensors: bool = False
    ) -> Communicator: ...


def _group_maker(
    rank: int, device: torch.device, timeout: timedelta, log: CollectiveLog, *, min_ranks: int
) -> _CommunicatorFactory:
    watchdog = CollectiveWatchdog(timeout.total_seconds())

    def make(
        name: str, axis: list[list[int]], kind: ExchangeKind, *, carries_host_tensors: bool = False
    ) -> Communicator:
        """Create the process groups of a mesh axis and return the communicator of this rank's group. Collective."""
        backend: Backend = "nccl" if kind == "collectives" and device.type == "cuda" else "gloo"
        if backend == "nccl":  # our watchdog reports the cause; torch's would abort the process
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            watchdog.start()
        own: Communicator | None = None
        for ranks in axis:
            # `new_group` is collective: every rank calls it for every group, even for those it is not in.
            group = dist.new_group(ranks, timeout=timeout, backend=backend) if len(ranks) >= min_ranks else None
            if rank in ranks:
                transport: Transport | None = None
                if group is not None and backend == "nccl" and carries_host_tensors:
                    transport = DeviceStagedTransport(group, device)
                elif group is not None:
                    transport = _transport(kind, group, device, timeout)
                group_watchdog = watchdog if group is not None and backend == "nccl" else None
                own = Communicator(name, ranks.index(rank), len(ranks), group, log, transport, watchdog=group_watchdog)
        assert own is not None
        return own

    return make


def _transport(kind: ExchangeKind, group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> Transport:
    if kind == "copy_engine":
        return CopyEngineTransport(group, device)
    if kind in ("auto", "shared_memory"):
        shared = SharedMemoryTransport.create(group, timeout)
        if shared is None and kind == "shared_memory":
            raise UserError(
                "the ranks cannot access each other's memory",
                option="parallel.transport",
                value="shared_memory",
                remedy="set --parallel.transport=collectives, or start all ranks on one host, outside containers",
            )
        return shared or CollectiveTransport(group)
    return HostStagedTransport(group) if kind == "host" else CollectiveTransport(group)
