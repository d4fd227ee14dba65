"""Who takes part in a run and how: the only holder of ranks and process groups.

Ranks form a mesh of replica groups times shards. Ranks of one replica group share the rows of the tables; ranks with
the same shard in different groups hold copies of the same rows. The placement says which of the two lie side by side:

    shards_contiguous      rank = replica * num_shards + shard      exchanges of a group stay inside a host
    replicas_contiguous    rank = shard * num_replicas + replica    copies of a row are kept alike inside a host

How ranks are arranged.
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
from nestrec.base.process import has_met_ranks, leave_ranks_at_end, take_leave_of_ranks
from nestrec.distributed.collective_watchdog import CollectiveWatchdog
from nestrec.distributed.rendezvous import meeting_watched, open_store
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
    replicas: Count = 1
    """groups of ranks that each hold all rows; a divisor of the number of ranks. Exchanges of vectors stay inside a
    group, and copies of a row are kept alike as replica_sync says"""
    placement: Placement = "shards_contiguous"
    """which ranks form a group: neighbours (vectors stay inside a host), or every so-many-th rank (the copies of a row
    lie inside a host)"""
    exchange: ExchangeKind = "auto"
    """how vectors and gradients get from device to device: collectives (NCCL, Gloo), host (over pinned host memory and
    Gloo, for any network), copy_engine (peer copies inside one NVLink domain) or shared_memory (between CPU ranks of
    one host; keys too). auto takes shared_memory where ranks are on CPUs of one host, host where several ranks share a
    device, which NCCL cannot, and else collectives"""
    hierarchy: bool = False
    """rows cross between hosts once for all ranks of a host that ask for them: each rank asks for them on behalf of its
    host, which sums the gradients before they leave. Takes hosts with equally many ranks of a group; to rounding equal
    to leaving it out, and every schedule to `serial` as always"""
    dense: Literal["replicated", "fsdp"] = "replicated"
    """dense weights: all of them on every rank, or of the encoder's layers a slice on each, with its gradients, moments
    and running means (torch's `fully_shard`), which is equal to rounding. On GPUs with the serial schedule only"""
    dense_bucket_mib: Positive = 25.0
    """dense gradients are summed over ranks in buckets of about this many MiB, those of the last layers first. Another
    size is equal to rounding"""
    dense_overlap: bool = True
    """the sum of a bucket begins as soon as the backward pass of the last micro-batch has its gradients, beside the
    rest of the pass; all but the last bucket. Changes no bit"""
    context: Count = 1
    """neighbouring ranks that hold every sequence together, each a part of its tokens, for histories that do not fit
    one device; a divisor of the number of ranks. Samples are dealt to groups of so many ranks"""


Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class Communicator:
    """A process group of its own for one kind of traffic."""

    name: str
    rank: int
    """Of this process inside the group."""
    size: int
    group: dist.ProcessGroup | None
    """None where the group is this process alone: nothing is sent."""
    log: CollectiveLog = field(repr=False)
    transport: Transport | None = field(default=None, repr=False)
    """How its bytes travel: by the collectives of the group, unless told otherwise; none where the group is."""
    watch: CollectiveWatchdog | None = field(default=None, repr=False)
    """Of collectives that the host does not wait for."""

    def __post_init__(self) -> None:
        if self.transport is None and self.group is not None:
            object.__setattr__(self, "transport", CollectiveTransport(self.group))


@dataclass(frozen=True, slots=True)
class HostGroup:
    """A replica group as hosts with equally many ranks. Shard s lives on host s // ranks, as its rank s % ranks.

    What a rank asks of shard s goes over rank s % ranks of its own host, which asks for all of them: between hosts only
    ranks of one number talk to each other.
    """

    ranks: int
    """Of the group on each host."""
    keys_within: Communicator
    vectors_within: Communicator
    """Ranks of the group on this host."""
    keys_between: Communicator
    vectors_between: Communicator
    """Ranks of this number on all hosts of the group."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Rank, mesh axes and communicators of a run."""

    rank: int
    world: int
    num_replicas: int
    placement: Placement
    device: torch.device
    keys: Communicator
    """Shards of this replica group; carries keys, which hosts make and read."""
    vectors: Communicator
    """Shards of this replica group; carries vectors and their gradients."""
    replica_keys: Communicator
    """Holders of copies of this shard; carries keys, which hosts make and read."""
    replicas: Communicator
    """Holders of copies of this shard; carries gradients of rows."""
    dense: Communicator
    """All ranks; carries dense gradients."""
    control: Communicator
    """All ranks; carries small host messages."""
    samples: Communicator
    """All ranks; carries samples between hosts, for batches to come. One thread of the data stages issues on it, beside
    the one that issues for steps: it has a log of its own, and its Gloo holds nothing that the others wait for."""
    groups: Communicator
    """One rank of each context group, that of this one's part; carries samples as `samples` does, between groups that
    are dealt them. Without context groups it is `samples`."""
    context: Communicator
    """Ranks that hold parts of the same sequences; carries their keys and values."""
    log: CollectiveLog = field(repr=False)
    hosts: HostGroup | None = None
    """Where exchanges go by hosts; none: every rank of a group talks to every other."""
    options: ParallelConfig = field(default_factory=ParallelConfig)
    """What was asked for."""
    more_groups: list[dist.ProcessGroup] = field(default_factory=list, repr=False, compare=False)
    """Made for these ranks by others, to be given back with those of the communicators."""

    @property
    def num_shards(self) -> int:
        return self.world // self.num_replicas

    @property
    def shard(self) -> int:
        return next(s for s, ranks in enumerate(self.replica_axis) if self.rank in ranks)

    @property
    def replica(self) -> int:
        return next(r for r, ranks in enumerate(self.shard_axis) if self.rank in ranks)

    @property
    def shard_axis(self) -> list[list[int]]:
        """For each replica group its ranks, in order of shard."""
        return mesh(self.world, self.num_replicas, self.placement)

    @property
    def replica_axis(self) -> list[list[int]]:
        """For each shard the ranks that hold it, in order of replica group."""
        return [list(ranks) for ranks in zip(*self.shard_axis, strict=True)]

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @staticmethod
    @contextlib.contextmanager
    def lent(make: "Callable[[], Topology]") -> "Iterator[Topology]":
        """What `make` gives, while the block lasts. Process groups that are made for it are given back at its end,
        whatever that is: where this rank alone has failed, the others hear of it at once, and all can meet again. The
        default group of a caller who has made one stays."""
        had_met = has_met_ranks()
        topology = None
        try:
            topology = make()
            yield topology
        finally:
            if not had_met:
                take_leave_of_ranks()
            elif topology is not None:
                take_leave_of_ranks(topology._own_groups())

    def _own_groups(self) -> list[dist.ProcessGroup]:
        """Those that were made for these ranks."""
        held = [getattr(self, each.name) for each in fields(self)]
        held += [] if self.hosts is None else [getattr(self.hosts, each.name) for each in fields(self.hosts)]
        groups = [one.group for one in held if isinstance(one, Communicator) and one.group is not None]
        groups += self.more_groups
        return list({id(group): group for group in groups}.values())

    @staticmethod
    def single(device: torch.device | str = "cpu") -> "Topology":
        """One process, no process groups."""
        log = CollectiveLog()
        place = torch.device(device)
        if str(place) == "cuda":  # threads of their own must be told which device
            place = torch.device("cuda", torch.cuda.current_device())

        def alone(name: str) -> Communicator:
            return Communicator(name, 0, 1, None, log)

        samples = Communicator("samples", 0, 1, None, CollectiveLog())
        return Topology(
            rank=0,
            world=1,
            num_replicas=1,
            placement="shards_contiguous",
            device=place,
            keys=alone("keys"),
            vectors=alone("vectors"),
            replica_keys=alone("replica_keys"),
            replicas=alone("replicas"),
            dense=alone("dense"),
            control=alone("control"),
            samples=samples,
            groups=samples,
            context=alone("context"),
            log=log,
        )

    @staticmethod
    def from_environment(
        device: str = "cpu", ranks: ParallelConfig | None = None, *, timeout_s: float = 300.0
    ) -> "Topology":
        """The topology that torchrun's environment describes; alone where it describes none.

        device: `cpu` (Gloo) or `cuda` (NCCL, on the device of LOCAL_RANK). timeout_s: after this long without an
        answer a peer counts as lost.
        """
        world = int(os.environ.get("WORLD_SIZE", "1"))
        place = torch.device(device)
        check_device(place)
        if device == "cuda":  # more ranks than devices share them
            place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        if place.type == "cuda":
            torch.cuda.set_device(place)
        if world == 1:
            _check_groups(ranks or ParallelConfig(), 1)
            return Topology.single(place)
        with meeting_watched():
            if not dist.is_initialized():
                gc.collect()  # what a failed start has left holds its groups, and others may wait in them
                store, rank, size = open_store(timeout_s)
                limit = timedelta(seconds=timeout_s)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
                leave_ranks_at_end()
            return Topology.of_process_group(place, ranks, timeout_s=timeout_s)

    @staticmethod
    def of_process_group(
        device: torch.device,
        ranks: ParallelConfig | None = None,
        *,
        timeout_s: float = 300.0,
        groups_of_one: bool = False,
    ) -> "Topology":
        """The topology over the ranks of the default process group; every rank must call it.

        groups_of_one: a rank that is alone in a group talks to itself by collectives, so that one device can run the
        code of many.
        """
        cfg = ranks or ParallelConfig()
        rank = dist.get_rank()
        world = dist.get_world_size()
        _check_groups(cfg, world)
        shard_axis = mesh(world, cfg.replicas, cfg.placement)
        replica_axis = [list(holders) for holders in zip(*shard_axis, strict=True)]
        everyone = [list(range(world))]
        log = CollectiveLog()
        make = _group_maker(rank, device, timedelta(seconds=timeout_s), log, fewest=1 if groups_of_one else 2)
        tensors = _exchange_of(cfg, device)
        hosts: ExchangeKind = tensors if device.type == "cpu" else "host"
        # Where vectors go by collectives of the device, keys do as well: nothing of a step passes Gloo.
        of_keys: ExchangeKind = tensors if tensors == "collectives" else hosts
        # Peer copies are for all-to-alls; where ranks share a device, sums go over the host.
        sums: ExchangeKind = "host" if _shares_device(device) else "collectives"
        samples = replace(make("samples", everyone, hosts), log=CollectiveLog())
        context_axis = mesh(world, world // cfg.context, "shards_contiguous")
        return Topology(
            rank=rank,
            world=world,
            num_replicas=cfg.replicas,
            placement=cfg.placement,
            device=device,
            log=log,
            keys=make("keys", shard_axis, of_keys, of_host=True),
            vectors=make("vectors", shard_axis, tensors),
            replica_keys=make("replica_keys", replica_axis, of_keys, of_host=True),
            replicas=make("replicas", replica_axis, tensors),
            dense=make("dense", everyone, sums),
            control=make("control", everyone, "host"),
            samples=samples,
            groups=samples if cfg.context == 1 else _between_groups(context_axis, make, hosts, samples),
            context=Communicator("context", 0, 1, None, log)
            if cfg.context == 1
            else make("context", context_axis, tensors),
            hosts=_hosts(cfg, shard_axis, make, tensors, of_keys),
            options=cfg,
        )


def mesh(world: int, num_replicas: int, placement: Placement) -> list[list[int]]:
    """For each replica group its ranks, in order of shard."""
    shards = world // num_replicas
    if placement == "shards_contiguous":
        return [list(range(r * shards, (r + 1) * shards)) for r in range(num_replicas)]
    return [list(range(r, world, num_replicas)) for r in range(num_replicas)]


def groups_by_host(shard_axis: list[list[int]], ranks_of_host: int) -> tuple[list[list[int]], list[list[int]]]:
    """For each replica group its ranks on each host, and those of one number over its hosts."""
    within, between = [], []
    for group in shard_axis:
        hosts = [list(ranks) for _, ranks in itertools.groupby(group, lambda rank: rank // ranks_of_host)]
        if len({len(ranks) for ranks in hosts}) > 1:
            raise UserError(
                f"hosts have different numbers of ranks of a group ({[len(ranks) for ranks in hosts]})",
                option="ranks.hierarchy",
                value=True,
                remedy="start equally many ranks on every host, or leave it out",
            )
        within += hosts
        between += [list(ranks) for ranks in zip(*hosts, strict=True)]
    return within, between


def _hosts(
    ranks: ParallelConfig, shard_axis: list[list[int]], make: "_Make", tensors: ExchangeKind, of_keys: ExchangeKind
) -> HostGroup | None:
    """None where there is nothing to gain: one host, or one rank of a group on each."""
    if not ranks.hierarchy:
        return None
    world = sum(len(group) for group in shard_axis)
    within, between = groups_by_host(shard_axis, int(os.environ.get("LOCAL_WORLD_SIZE", str(world))))
    if len(within[0]) == 1 or len(between[0]) == 1:
        return None
    return HostGroup(
        ranks=len(within[0]),
        keys_within=make("keys_within", within, of_keys, of_host=True),
        vectors_within=make("vectors_within", within, tensors),
        keys_between=make("keys_between", between, of_keys, of_host=True),
        vectors_between=make("vectors_between", between, tensors),
    )


def check_device(device: torch.device | str) -> None:
    """Raise a UserError where a GPU is asked for and torch has none."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        remedy = "take cpu, or see what `nestrec doctor` says about CUDA"
        raise UserError("torch finds no GPU here", option="device", value=str(device), remedy=remedy)


def _between_groups(
    context_axis: list[list[int]], make: "_Make", exchange: ExchangeKind, samples: Communicator
) -> Communicator:
    columns = [list(ranks) for ranks in zip(*context_axis, strict=True)]
    return replace(make("groups", columns, exchange), log=samples.log)


def _check_groups(ranks: ParallelConfig, world: int) -> None:
    for name in ("replicas", "context"):
        if world % (value := getattr(ranks, name)):
            remedy = f"choose a divisor of {world}"
            raise UserError("must divide the number of ranks", option=f"ranks.{name}", value=value, remedy=remedy)


def _shares_device(device: torch.device) -> bool:
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return device.type == "cuda" and ranks_here > torch.cuda.device_count()


def _exchange_of(ranks: ParallelConfig, device: torch.device) -> ExchangeKind:
    """What was asked for, where the devices allow it."""
    is_shared = _shares_device(device)
    if device.type == "cpu" and ranks.exchange == "auto":
        return "auto"  # known when the ranks of a group have met
    if ranks.exchange == "auto":
        return "host" if is_shared else "collectives"
    if ranks.exchange == "collectives" and is_shared:
        remedy = "take ranks.exchange=host or copy_engine, or a device for each rank"
        raise UserError("NCCL needs a device for each rank", option="ranks.exchange", value="collectives", remedy=remedy)
    if ranks.exchange == "copy_engine":
        _check_peers(device)
        os.environ.setdefault(
            "TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"
        )  # copies need no multicast, and set-up is quicker
        if is_shared:
            os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    if ranks.exchange == "shared_memory" and device.type != "cpu":
        raise UserError(
            "is for ranks on CPUs", option="ranks.exchange", value="shared_memory", remedy="take ranks.exchange=host"
        )
    return ranks.exchange


def _check_peers(device: torch.device) -> None:
    """Symmetric memory is mapped by the ranks of one host."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type != "cuda" or ranks_here != dist.get_world_size():
        raise UserError(
            "copies between devices need CUDA and all ranks on one host",
            option="ranks.exchange",
            value="copy_engine",
            remedy="take ranks.exchange=host or collectives",
        )


class _Make(Protocol):
    def __call__(
        self, name: str, axis: list[list[int]], exchange: ExchangeKind, *, of_host: bool = False
    ) -> Communicator: ...


def _group_maker(rank: int, device: torch.device, timeout: timedelta, log: CollectiveLog, *, fewest: int) -> _Make:
    watch = CollectiveWatchdog(timeout.total_seconds())

    def make(name: str, axis: list[list[int]], exchange: ExchangeKind, *, of_host: bool = False) -> Communicator:
        """of_host: it carries tensors of the host."""
        backend: Backend = "nccl" if exchange == "collectives" and device.type == "cuda" else "gloo"
        if backend == "nccl":  # the watch says why; torch's own would abort the process
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            watch.start()
        mine: Communicator | None = None
        for ranks in axis:
            # Every rank takes part in the making of every group, its own or not.
            group = dist.new_group(ranks, timeout=timeout, backend=backend) if len(ranks) >= fewest else None
            if rank in ranks:
                transport: Transport | None = None
                if group is not None and backend == "nccl" and of_host:
                    transport = DeviceStagedTransport(group, device)
                elif group is not None:
                    transport = _transport(exchange, group, device, timeout)
                watched = watch if group is not None and backend == "nccl" else None
                mine = Communicator(name, ranks.index(rank), len(ranks), group, log, transport, watch=watched)
        assert mine is not None
        return mine

    return make


def _transport(exchange: ExchangeKind, group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> Transport:
    if exchange == "copy_engine":
        return CopyEngineTransport(group, device)
    if exchange in ("auto", "shared_memory"):
        shared = SharedMemoryTransport.between(group, timeout)
        if shared is None and exchange == "shared_memory":
            raise UserError(
                "ranks cannot reach each other's memory",
                option="ranks.exchange",
                value="shared_memory",
                remedy="take ranks.exchange=collectives, or start all ranks on one host, outside containers",
            )
        return shared or CollectiveTransport(group)
    return HostStagedTransport(group) if exchange == "host" else CollectiveTransport(group)
