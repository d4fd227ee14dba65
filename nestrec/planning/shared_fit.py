"""The cost model of `nestrec bench prediction`, fitted to serial runs alone.

In a serial run nothing overlaps, so the durations of its stages put one after another say when each exchange began, and
with that how full the bucket of the link was: what an exchange took beyond its bytes is work, or bad luck of TCP.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nestrec.planning.fit import Observed, fit_profile, ratios_of
from nestrec.planning.links import Group, Links
from nestrec.planning.loads import KEY_BYTES
from nestrec.planning.profile import Profile, Rate
from nestrec.planning.simulator.variation import Spread

_SMALL_S = 1.5e-3
"""Exchanges whose bytes take less say what the work of an exchange is; those whose bytes take more, what links do."""


@dataclass(frozen=True, slots=True)
class TimedExchange:
    """An exchange of a serial run."""

    kind: str
    """keys, vectors, gradients or dense"""
    measured_s: float
    num_bytes: float
    """that leave a rank"""
    bytes_s: float
    """their time on an empty bucket"""
    waited_s: float
    """the part of it that the bucket did not cover"""


@dataclass(frozen=True, slots=True)
class WorldFit:
    """What exchanges between so many ranks are like."""

    work: dict[str, Rate]
    """of each kind"""
    spread: Spread
    """time of bytes over what the link promises, by bytes"""


def exchanges_of(observed: Observed) -> Iterable[TimedExchange]:
    """All exchanges of a serial run, each rank in its own order."""
    world, parts = observed.loads.world, observed.loads.num_micro_batches
    links, burst_s = observed.links(), observed.burst_bytes / (observed.gb_per_s * 1e9)
    steps = sorted({step for step, _, _ in observed.stages["train.compute"]})
    for rank in range(world):
        now, sent = 0.0, -np.inf
        for step in steps:
            for name, part, kind in _order(parts):
                seconds = observed.stages[name][step, rank, part]
                if kind:
                    bytes_s = _bytes_s(observed, links, kind, (step, rank, part))
                    sent = max(sent, now - burst_s) + bytes_s
                    num_bytes = bytes_s * observed.gb_per_s * 1e9
                    yield TimedExchange(kind, seconds, num_bytes, bytes_s, max(0.0, sent - now))
                now += seconds


def _order(parts: int) -> list[tuple[str, int, str]]:
    """Stages of a serial step: name, micro-batch, and the kind of exchange where it is one."""
    order = [("train.embedding.route", 0, "keys"), ("train.embedding.fetch", 0, "")]
    for part in range(parts):
        order += [
            ("train.embedding.vectors", part, "vectors"),
            ("train.compute", part, ""),
            ("train.embedding.gradients", part, "gradients"),
        ]
    return [
        *order,
        ("train.dense.reduce", 0, "dense"),
        ("train.dense.update", 0, ""),
        ("train.embedding.update", 0, ""),
        ("train.embedding.write_back", 0, ""),
    ]


def _bytes_s(observed: Observed, links: Links, kind: str, place: tuple[int, int, int]) -> float:
    step, rank, part = place
    loads, p, everyone = observed.loads, observed.loads.place(step), Group(observed.loads.world)
    if kind == "dense":
        return float(links.all_reduce_s(everyone, loads.dense_bytes))
    if kind == "keys":
        return float(links.all_to_all_s(everyone, float(loads.asked[p][rank].sum()) * KEY_BYTES))
    amounts = (loads.served_bytes, loads.received_bytes)
    return float(links.all_to_all_s(everyone, max(float(amount[p][rank, part]) for amount in amounts)))


def fit_world(observed: Sequence[Observed], cores: int) -> WorldFit:
    """From the serial runs of one number of ranks. All ranks work at once before they exchange, so cores are shared."""
    found = [exchange for one in observed for exchange in exchanges_of(one)]
    share = min(1.0, cores / observed[0].loads.world)
    work = {kind: Rate(fixed_s=share * _work(found, kind)) for kind in ("keys", "vectors", "gradients", "dense")}
    pairs = [
        (e.num_bytes, (e.measured_s - work[e.kind].fixed_s / share + e.bytes_s - e.waited_s) / e.bytes_s)
        for e in found
        if e.kind in ("vectors", "gradients") and e.waited_s > _SMALL_S
    ]
    sizes, ratios = np.array(pairs or [(0.0, 1.0)]).T
    return WorldFit(work, Spread.of(sizes, np.maximum(0.3, ratios)))


def _work(found: Sequence[TimedExchange], kind: str) -> float:
    """What an exchange takes beside its bytes: the median, over those with few of them where there are any."""
    mine = [e for e in found if e.kind == kind]
    small = [e for e in mine if e.waited_s < _SMALL_S] or mine
    return max(0.0, statistics.median(e.measured_s - e.waited_s for e in small))


def profile_of(plain: Sequence[Observed], world: WorldFit) -> Profile:
    """Lines of the stages of ranks with cores of their own, and the work of exchanges between so many ranks.

    Deduplication and assembly are inside the serial key exchange, and stay there.
    """
    return replace(
        fit_profile(plain, Profile()),
        exchange_keys=world.work["keys"],
        exchange_vectors=world.work["vectors"],
        exchange_gradients=world.work["gradients"],
        dense_reduce=world.work["dense"],
    )


def compute_spread(plain: Sequence[Observed], profile: Profile) -> Spread:
    """How computation varies, whatever its amount."""
    rate = Rate(fixed_s=profile.compute.fixed_s, unit_s=profile.compute.flop_s)
    ratios = ratios_of(plain, "train.compute", "linear_flops", rate)
    shuffled = np.random.default_rng(0).permutation(ratios)
    return Spread(np.zeros(len(ratios)), shuffled)


def describe(world: WorldFit) -> dict[str, Any]:
    """For the result file."""
    work = {f"{kind}_ms": round(rate.fixed_s * 1e3, 3) for kind, rate in world.work.items()}
    low, middle, high = np.percentile(world.spread.ratios, [10, 50, 90])
    return {**work, "byte_time_ratio_p10_p50_p90": [round(float(v), 2) for v in (low, middle, high)]}
