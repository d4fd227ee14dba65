"""Hardware profile: costs of operations and of transfers over a hierarchy of links.

How long exchanges take on a hierarchy of links: inside a host, inside a rack, between racks.

A level joins `ranks` neighbouring ranks. What leaves a level passes through the links of the next, so an exchange is as
slow as the most loaded level. Each further peer costs a message, and many senders to one receiver slow the bytes down.

What the operations of a step take on a machine: a line for each, measured by `nestrec bench calibrate` or given.

The amounts that an operation is charged for stand beside its name. Time on links is not here (see links).
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from nestrec.base.config import config
from nestrec.base.config_values import Natural, NonNegative, Positive


@config
class Link:
    """One level of the hierarchy, as one rank sees it."""

    name: str
    """host, rack, fabric"""
    ranks: Natural
    """neighbouring ranks that it joins; 0: all"""
    gb_per_s: Positive
    """bandwidth of a rank, each way"""
    latency_us: NonNegative = 0.0
    """of a transfer"""
    message_us: NonNegative = 0.0
    """of each further peer"""
    fan_in: NonNegative = 0.0
    """by what part the bytes of an All2All take longer for each peer"""
    burst_bytes: NonNegative = 0.0
    """bytes that pass at no cost after a pause: the bucket of a link that is limited"""


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that exchange: `size` of them, `stride` apart."""

    size: int
    stride: int = 1

    def within(self, ranks: int) -> int:
        """How many of them are among `ranks` neighbours (0: all)."""
        return self.size if ranks == 0 else max(1, min(self.size, ranks // self.stride))


@dataclass(frozen=True, slots=True)
class TransferTime:
    """An exchange on links, in seconds."""

    wire_s: Any
    """of the bytes on the most loaded level"""
    latency_s: float
    """of transfers and messages"""
    burst_s: float
    """of the bytes that pass at no cost after a pause, on the outermost level that is crossed"""


@dataclass(frozen=True, slots=True)
class Links:
    """Levels from the innermost to the outermost."""

    levels: tuple[Link, ...]

    def capped(self, gb_per_s: float) -> "Links":
        """The same with no level quicker than this."""
        return Links(tuple(replace(link, gb_per_s=min(link.gb_per_s, gb_per_s)) for link in self.levels))

    def all_to_all_s(self, group: Group, num_bytes: Any) -> Any:
        """As `all_to_all`, where the link was busy before."""
        crossing = self.all_to_all(group, num_bytes)
        return crossing.wire_s + crossing.latency_s

    def all_to_all(self, group: Group, num_bytes: Any) -> "TransferTime":
        """Each rank sends `num_bytes` (a number, or one a rank) in equal parts to all of the group, itself included."""
        slowest = 0.0 * num_bytes
        extra = 0.0
        burst = 0.0
        inside = 1
        for link in self.levels:
            peers = group.within(link.ranks) - inside
            if peers <= 0:
                continue
            leaving = num_bytes * (group.size - inside) / group.size
            slowest = np.maximum(slowest, leaving * (1.0 + link.fan_in * peers) / (link.gb_per_s * 1e9))
            extra += link.latency_us * 1e-6 + peers * link.message_us * 1e-6
            burst = link.burst_bytes / (link.gb_per_s * 1e9)
            inside += peers
        return TransferTime(slowest, extra, burst)

    def all_reduce_s(self, group: Group, num_bytes: Any) -> Any:
        """As `all_reduce`, where the link was busy before."""
        crossing = self.all_reduce(group, num_bytes)
        return crossing.wire_s + crossing.latency_s

    def all_reduce(self, group: Group, num_bytes: Any) -> "TransferTime":
        """A ring at each level, over what the levels inside it have left: reduce-scatter inwards, gather outwards."""
        wire = 0.0
        extra = 0.0
        burst = 0.0
        inside = 1
        for link in self.levels:
            parts = group.within(link.ranks) // inside
            if parts <= 1:
                continue
            wire = wire + 2.0 * (parts - 1) / parts * num_bytes / inside / (link.gb_per_s * 1e9)
            extra += 2 * (link.latency_us + (parts - 1) * link.message_us) * 1e-6
            burst = link.burst_bytes / (link.gb_per_s * 1e9)
            inside *= parts
        return TransferTime(wire, extra, burst)

    def bytes_leaving(self, group: Group, num_bytes: float) -> dict[str, float]:
        """Bytes that a rank sends through each level in an All2All."""
        found = {}
        inside = 1
        for link in self.levels:
            peers = max(0, group.within(link.ranks) - inside)
            found[link.name] = num_bytes * (group.size - inside) / group.size if peers else 0.0
            inside += peers
        return found

    def bytes_reduced(self, group: Group, num_bytes: float) -> dict[str, float]:
        """Bytes that a rank sends through each level in an all-reduce."""
        found = {}
        inside = 1
        for link in self.levels:
            parts = max(1, group.within(link.ranks) // inside)
            found[link.name] = 2.0 * (parts - 1) / parts * num_bytes / inside
            inside *= parts
        return found


StoreKind = Literal["device", "dram", "disk"]


@config
class LinearCost:
    """Seconds of an operation: `fixed_s + unit_s * amount`."""

    fixed_s: NonNegative = 0.0
    """however little there is to do"""
    unit_s: NonNegative = 0.0
    """for each unit of its amount"""

    def of(self, amount: float) -> float:
        return self.fixed_s + self.unit_s * amount


@config
class StoreRates:
    """Rows between a store and the buffers of the device; for each byte of rows."""

    fetch: LinearCost = LinearCost()
    """from the store"""
    write_back: LinearCost = LinearCost()
    """to the store"""


@config
class ComputeRates:
    """Forward and backward of a micro-batch."""

    fixed_s: NonNegative = 0.0
    """launches and whatever does not depend on tokens"""
    flop_s: NonNegative = 0.0
    """for each operation that grows with tokens"""
    attention_flop_s: NonNegative = 0.0
    """for each operation that grows with the square of a length"""


@config
class Profile:
    """A device and its host."""

    deduplicate: LinearCost = LinearCost()
    """for each key of the batch"""
    exchange_keys: LinearCost = LinearCost()
    """work of the host, for each key asked for"""
    arrange: LinearCost = LinearCost()
    """for each key asked for, over all micro-batches"""
    device: StoreRates = StoreRates()
    """rows kept on the device"""
    dram: StoreRates = StoreRates()
    """rows kept in host memory"""
    disk: StoreRates = StoreRates()
    """rows kept on disk"""
    exchange_vectors: LinearCost = LinearCost()
    """putting together, for each byte sent"""
    exchange_gradients: LinearCost = LinearCost()
    """putting together, for each byte sent"""
    add_gradients: LinearCost = LinearCost()
    """for each byte received"""
    peers: LinearCost = LinearCost()
    """work of the host in an exchange of keys, vectors or gradients, for each rank of the group (`nestrec bench host`
    says how it grows)"""
    update_rows: LinearCost = LinearCost()
    """for each byte of rows"""
    intersect: LinearCost = LinearCost()
    """rows in both of two batches, for each row of a batch"""
    copy: LinearCost = LinearCost()
    """for each byte of rows in both"""
    dense_reduce: LinearCost = LinearCost()
    """work of the device, for each byte of dense gradients"""
    dense_apply: LinearCost = LinearCost()
    """for each byte of dense weights"""
    compute: ComputeRates = ComputeRates()
    """the model"""

    def store(self, kind: StoreKind) -> StoreRates:
        return {"device": self.device, "dram": self.dram, "disk": self.disk}[kind]
