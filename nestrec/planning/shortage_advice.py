"""Advice for plans that do not fit into memory, and scaling curves.

A shortage names the memory tier that is too small, the missing bytes, and the single changes that would make the plan
fit. Scaling curves show weak scaling: step time and efficiency with constant samples per rank, for each schedule.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nestrec.pipeline.schedule_spec import SCHEDULES, ScheduleName
from nestrec.planning.cluster_config import ClusterConfig
from nestrec.planning.predictor import Predictor
from nestrec.planning.search_space import FIELDS, Candidate, Space
from nestrec.planning.tier_memory import Memory, Tier
from nestrec.planning.workload import Workload

_MORE_HOSTS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Shortage:
    """A memory tier that is too small for a plan."""

    tier: Tier
    memory: Memory
    remedies: tuple[str, ...]
    """Single changes, each of which makes the whole plan fit."""

    def __str__(self) -> str:
        what = ", ".join(f"{name} {getattr(self.memory, name):,.0f}" for name in _PARTS if getattr(self.memory, name))
        remedy = " or ".join(self.remedies) or "no single option helps; use larger hosts or smaller tables"
        return (
            f"the {self.tier} tier of a rank is short by {self.memory.missing:,.0f} bytes: it needs "
            f"{self.memory.needed:,.0f} ({what}) and has {self.memory.limit:,.0f}; possible changes: {remedy}"
        )


_PARTS = ("tables", "state", "buffers", "activations", "dense")


def shortages(predictor: Predictor, candidate: Candidate, space: Space) -> list[Shortage]:
    """Return the memory tiers into which a candidate does not fit; empty if it fits."""
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


def resize_cluster(cluster: ClusterConfig, world: int) -> ClusterConfig:
    """Return a cluster of the same kind with `world` ranks."""
    ranks = min(world, cluster.host.ranks)
    return replace(cluster, hosts=max(1, world // ranks), host=replace(cluster.host, ranks=ranks))


WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class Curve:
    """Scaling curve of one schedule."""

    schedule: str
    worlds: tuple[int, ...]
    """Numbers of ranks, increasing."""
    step_s: tuple[float, ...]
    """Step time in seconds for each number of ranks."""

    @property
    def efficiency(self) -> tuple[float, ...]:
        """Throughput per rank relative to that on the smallest number of ranks."""
        return tuple(self.step_s[0] / step for step in self.step_s)


def scaling_curves(
    workload: Workload,
    cluster: ClusterConfig,
    base: Candidate,
    schedules: Sequence[ScheduleName],
    worlds: Sequence[int] = WORLDS,
) -> list[Curve]:
    """Predict weak scaling curves.

    Args:
        workload: The recipe; its samples per rank stay constant.
        cluster: The cluster, which is resized.
        base: Configuration to vary; only the schedule changes. Schedules without micro-batches use one micro-batch.
        schedules: Schedules to compare.
        worlds: Numbers of ranks.
    """
    samples = max(1, workload.batch_samples // cluster.world)
    times: dict[str, list[float]] = {schedule: [] for schedule in schedules}
    for world in worlds:
        predictor = Predictor(replace(workload, batch_samples=samples * world), resize_cluster(cluster, world))
        for schedule in schedules:
            parts = max(2, base.micro_batches) if SCHEDULES.find(schedule).splits else 1
            candidate = replace(
                base,
                schedule=schedule,
                micro_batches=min(parts, samples),
                window_cache=False,
                replicas=min(base.replicas, world),
            )
            times[schedule].append(predictor.predict(candidate).step_s)
    return [Curve(schedule, tuple(worlds), tuple(steps)) for schedule, steps in times.items()]
