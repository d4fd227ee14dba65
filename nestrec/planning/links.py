"""How long exchanges take on a hierarchy of links: inside a host, inside a rack, between racks.

A level joins `ranks` neighbouring ranks. What leaves a level passes through the links of the next, so an exchange is as
slow as the most loaded level. Each further peer costs a message, and many senders to one receiver slow the bytes down.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from nestrec.base.config import config


@config
class Link:
    """One level of the hierarchy, as one rank sees it."""

    name: str
    """host, rack, fabric"""
    ranks: int
    """neighbouring ranks that it joins; 0: all"""
    gb_per_s: float
    """bandwidth of a rank, each way"""
    latency_us: float = 0.0
    """of a transfer"""
    message_us: float = 0.0
    """of each further peer"""
    fan_in: float = 0.0
    """by what part the bytes of an All2All take longer for each peer"""
    burst_bytes: float = 0.0
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
class Links:
    """Levels from the innermost to the outermost."""

    levels: tuple[Link, ...]

    def all_to_all_s(self, group: Group, num_bytes: Any) -> Any:
        """Each rank sends `num_bytes` (a number, or one a rank) in equal parts to all of the group, itself included."""
        if group.size == 1:
            return 0.0
        slowest, extra, inside = 0.0 * num_bytes, 0.0, 1
        for link in self.levels:
            peers = group.within(link.ranks) - inside
            if peers <= 0:
                continue
            leaving = np.maximum(0.0, num_bytes * (group.size - inside) / group.size - link.burst_bytes)
            slowest = np.maximum(slowest, leaving * (1.0 + link.fan_in * peers) / (link.gb_per_s * 1e9))
            extra += link.latency_us * 1e-6 + peers * link.message_us * 1e-6
            inside += peers
        return slowest + extra

    def all_reduce_s(self, group: Group, num_bytes: Any) -> Any:
        """A ring at each level, over what the levels inside it have left: reduce-scatter inwards, gather outwards."""
        total, inside = 0.0, 1
        for link in self.levels:
            parts = group.within(link.ranks) // inside
            if parts <= 1:
                continue
            crossing = np.maximum(0.0, 2.0 * (parts - 1) / parts * num_bytes / inside - link.burst_bytes)
            total += crossing / (link.gb_per_s * 1e9) + 2 * (link.latency_us + (parts - 1) * link.message_us) * 1e-6
            inside *= parts
        return total

    def bytes_leaving(self, group: Group, num_bytes: float) -> dict[str, float]:
        """Bytes that a rank sends through each level in an All2All."""
        found, inside = {}, 1
        for link in self.levels:
            peers = max(0, group.within(link.ranks) - inside)
            found[link.name] = num_bytes * (group.size - inside) / group.size if peers else 0.0
            inside += peers
        return found

    def bytes_reduced(self, group: Group, num_bytes: float) -> dict[str, float]:
        """Bytes that a rank sends through each level in an all-reduce."""
        found, inside = {}, 1
        for link in self.levels:
            parts = max(1, group.within(link.ranks) // inside)
            found[link.name] = 2.0 * (parts - 1) / parts * num_bytes / inside
            inside *= parts
        return found
