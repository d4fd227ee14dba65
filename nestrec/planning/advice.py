"""What to do where a plan does not fit: which tier is short, by how much, and the one change that would help."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nestrec.planning.candidate import FIELDS, Candidate, Space
from nestrec.planning.cluster import ClusterConfig
from nestrec.planning.memory import Memory, Tier
from nestrec.planning.outcome import Predictor

_MORE_HOSTS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Shortage:
    """A tier that is too small."""

    tier: Tier
    memory: Memory
    remedies: tuple[str, ...]
    """changes, each of which makes the whole plan fit"""

    def __str__(self) -> str:
        what = ", ".join(f"{name} {getattr(self.memory, name):,.0f}" for name in _PARTS if getattr(self.memory, name))
        remedy = " or ".join(self.remedies) or "no single option helps; take larger hosts, or smaller tables"
        return (
            f"the {self.tier} tier of a rank is short by {self.memory.missing:,.0f} bytes: it needs "
            f"{self.memory.needed:,.0f} ({what}) and has {self.memory.limit:,.0f}; this would fix it: {remedy}"
        )


_PARTS = ("tables", "state", "buffers", "activations", "dense")


def shortages(predictor: Predictor, candidate: Candidate, space: Space) -> list[Shortage]:
    """Tiers in which a candidate does not fit; none where it does."""
    memory = predictor.memory(candidate)
    short = {tier: m for tier, m in memory.items() if m.missing > 0}
    if not short:
        return []
    remedies = tuple(_remedies(predictor, candidate, space))
    return [Shortage(tier, m, remedies) for tier, m in short.items()]


def _remedies(predictor: Predictor, candidate: Candidate, space: Space) -> Iterator[str]:
    for field in FIELDS:
        for value in space.values(field):
            changed = replace(candidate, **{field: value})
            if changed != candidate and space.is_sensible(changed) and _fits(predictor, changed):
                yield f"{field}={value}"
                break
    for times in _MORE_HOSTS:
        larger = replace(predictor.cluster, hosts=predictor.cluster.hosts * times)
        if _fits(Predictor(predictor.workload, larger), candidate):
            yield f"{larger.hosts} hosts instead of {predictor.cluster.hosts}"
            return


def _fits(predictor: Predictor, candidate: Candidate) -> bool:
    if predictor.cluster.world % candidate.replicas:
        return False
    return all(memory.missing == 0 for memory in predictor.memory(candidate).values())


def hosts_of(cluster: ClusterConfig, world: int) -> ClusterConfig:
    """The same kind of cluster with `world` ranks."""
    ranks = min(world, cluster.host.ranks)
    return replace(cluster, hosts=max(1, world // ranks), host=replace(cluster.host, ranks=ranks))
