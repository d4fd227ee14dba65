"""Hardware profile: cost models of operations and of collectives over a hierarchy of links.

`Links` models collectives on a hierarchy of links: inside a host, inside a rack, between racks. A level connects
`ranks` neighboring ranks; bytes that leave a level pass through the links of the next one, so that a collective takes
as long as on its most loaded level. Each further peer adds a latency, and many senders per receiver (incast) reduce the
bandwidth.

`Profile` contains a linear cost of each operation of a training step, measured by `nestrec bench calibrate` or set by
hand. The field docs name the amount that multiplies `unit_s`. Time on links is not part of a profile.
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
    """Name of the level, for example host, rack or fabric."""
    ranks: Natural
    """Number of neighboring ranks that the level connects; 0 means all ranks."""
    gb_per_s: Positive
    """Bandwidth of a rank in each direction, in GB/s."""
    latency_us: NonNegative = 0.0
    """Latency of a transfer in microseconds."""
    per_peer_latency_us: NonNegative = 0.0
    """Additional latency per peer in microseconds."""
    all_to_all_penalty: NonNegative = 0.0
    """Relative increase of the transfer time of an all-to-all per peer."""
    burst_bytes: NonNegative = 0.0
    """Bytes that pass without delay after a pause: the token bucket of a rate-limited link."""


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks of a collective: `size` ranks at a distance of `stride`."""

    size: int
    stride: int = 1

    def within(self, ranks: int) -> int:
        """Return how many ranks of the group are among `ranks` neighboring ranks (0: all)."""
        return self.size if ranks == 0 else max(1, min(self.size, ranks // self.stride))


@dataclass(frozen=True, slots=True)
class TransferTime:
    """Time of a collective on the links, in seconds."""

    wire_s: Any
    """Transfer time of the bytes on the most loaded level."""
    latency_s: float
    """Sum of the latencies."""
    burst_s: float
    """Transfer time of the bytes that pass without delay after a pause, on the outermost level in use."""


@dataclass(frozen=True, slots=True)
class Links:
    """Cost model of collectives on a hierarchy of links."""

    levels: tuple[Link, ...]
    """Levels from the innermost to the outermost."""

    def limited_to(self, gb_per_s: float) -> "Links":
        """Return the same links with the bandwidth of each level limited to `gb_per_s`."""
        return Links(tuple(replace(link, gb_per_s=min(link.gb_per_s, gb_per_s)) for link in self.levels))

    def all_to_all_s(self, group: Group, num_bytes: Any) -> Any:
        """Return the seconds of an `all_to_all` on a busy link, without the burst allowance."""
        transfer = self.all_to_all(group, num_bytes)
        return transfer.wire_s + transfer.latency_s

    def all_to_all(self, group: Group, num_bytes: Any) -> "TransferTime":
        """Return the time of an all-to-all.

        Args:
            group: Ranks that take part.
            num_bytes: Bytes that each rank sends in equal parts to all ranks of the group, itself included; a number,
                or an array with one value per rank.
        """
        slowest = 0.0 * num_bytes
        extra = 0.0
        burst = 0.0
        inside = 1
        for link in self.levels:
            peers = group.within(link.ranks) - inside
            if peers <= 0:
                continue
            leaving = num_bytes * (group.size - inside) / group.size
            slowest = np.maximum(slowest, leaving * (1.0 + link.all_to_all_penalty * peers) / (link.gb_per_s * 1e9))
            extra += link.latency_us * 1e-6 + peers * link.per_peer_latency_us * 1e-6
            burst = link.burst_bytes / (link.gb_per_s * 1e9)
            inside += peers
        return TransferTime(slowest, extra, burst)

    def all_reduce_s(self, group: Group, num_bytes: Any) -> Any:
        """Return the seconds of an `all_reduce` on a busy link, without the burst allowance."""
        transfer = self.all_reduce(group, num_bytes)
        return transfer.wire_s + transfer.latency_s

    def all_reduce(self, group: Group, num_bytes: Any) -> "TransferTime":
        """Return the time of a hierarchical ring all-reduce: reduce-scatter from the innermost level outward, then
        all-gather back; each level transfers only the shards that the levels inside it have left."""
        wire = 0.0
        extra = 0.0
        burst = 0.0
        inside = 1
        for link in self.levels:
            parts = group.within(link.ranks) // inside
            if parts <= 1:
                continue
            wire = wire + 2.0 * (parts - 1) / parts * num_bytes / inside / (link.gb_per_s * 1e9)
            extra += 2 * (link.latency_us + (parts - 1) * link.per_peer_latency_us) * 1e-6
            burst = link.burst_bytes / (link.gb_per_s * 1e9)
            inside *= parts
        return TransferTime(wire, extra, burst)

    def bytes_leaving(self, group: Group, num_bytes: float) -> dict[str, float]:
        """Return the bytes that a rank sends through each level in an all-to-all."""
        result = {}
        inside = 1
        for link in self.levels:
            peers = max(0, group.within(link.ranks) - inside)
            result[link.name] = num_bytes * (group.size - inside) / group.size if peers else 0.0
            inside += peers
        return result

    def bytes_reduced(self, group: Group, num_bytes: float) -> dict[str, float]:
        """Return the bytes that a rank sends through each level in an all-reduce."""
        result = {}
        inside = 1
        for link in self.levels:
            parts = max(1, group.within(link.ranks) // inside)
            result[link.name] = 2.0 * (parts - 1) / parts * num_bytes / inside
            inside *= parts
        return result


StoreKind = Literal["device", "dram", "disk"]


@config
class LinearCost:
    """Linear cost of an operation in seconds: `fixed_s + unit_s * amount`."""

    fixed_s: NonNegative = 0.0
    """Fixed cost in seconds, independent of the amount."""
    unit_s: NonNegative = 0.0
    """Cost in seconds per unit of the amount."""

    def of(self, amount: float) -> float:
        """Return the seconds for an amount."""
        return self.fixed_s + self.unit_s * amount


@config
class StoreRates:
    """Cost of moving rows between a store and the device buffers, per byte of rows."""

    fetch: LinearCost = LinearCost()
    """Cost of reading rows from the store, per byte."""
    write_back: LinearCost = LinearCost()
    """Cost of writing rows back to the store, per byte."""


@config
class ComputeRates:
    """Cost of the forward and backward pass of a micro-batch."""

    fixed_s: NonNegative = 0.0
    """Fixed cost in seconds: kernel launches and other work that does not depend on the number of tokens."""
    flop_s: NonNegative = 0.0
    """Seconds per floating-point operation that scales with the number of tokens."""
    attention_flop_s: NonNegative = 0.0
    """Seconds per floating-point operation that scales with the square of the sequence length."""


@config
class Profile:
    """Measured costs of the operations of a training step on a device and its host."""

    deduplicate: LinearCost = LinearCost()
    """Deduplication of keys, per key of the batch."""
    exchange_keys: LinearCost = LinearCost()
    """Host work of the key exchange, per requested key."""
    arrange: LinearCost = LinearCost()
    """Building of the exchange plan, per requested key of all micro-batches."""
    device: StoreRates = StoreRates()
    """Access to rows that are stored in device memory."""
    dram: StoreRates = StoreRates()
    """Access to rows that are stored in host memory."""
    disk: StoreRates = StoreRates()
    """Access to rows that are stored on disk."""
    exchange_vectors: LinearCost = LinearCost()
    """Packing for the all-to-all of embeddings, per byte sent."""
    exchange_gradients: LinearCost = LinearCost()
    """Packing for the all-to-all of gradients, per byte sent."""
    add_gradients: LinearCost = LinearCost()
    """Accumulation of received gradients, per byte."""
    peers: LinearCost = LinearCost()
    """Host work of an exchange of keys, embeddings or gradients, per rank of the group (measured by `nestrec bench
    host`)."""
    update_rows: LinearCost = LinearCost()
    """Optimizer update of embedding rows, per byte of rows."""
    intersect: LinearCost = LinearCost()
    """Search for the rows that two batches share, per row of a batch."""
    copy: LinearCost = LinearCost()
    """Copy of the rows that two batches share, per byte."""
    dense_reduce: LinearCost = LinearCost()
    """Device work of the all-reduce of dense gradients, per byte."""
    dense_apply: LinearCost = LinearCost()
    """Optimizer update of the dense weights, per byte."""
    compute: ComputeRates = ComputeRates()
    """Forward and backward pass of the model."""

    def store(self, kind: StoreKind) -> StoreRates:
        """Return the access costs of a store."""
        return {"device": self.device, "dram": self.dram, "disk": self.disk}[kind]
