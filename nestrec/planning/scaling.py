"""Scaling curves: the same samples a rank on more and more ranks, for each schedule."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nestrec.pipeline.options import ScheduleName
from nestrec.pipeline.schedule_spec import SCHEDULES
from nestrec.planning.advice import hosts_of
from nestrec.planning.candidate import Candidate
from nestrec.planning.cluster import ClusterConfig
from nestrec.planning.outcome import Predictor
from nestrec.planning.workload import Workload

WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class Curve:
    """One schedule."""

    schedule: str
    worlds: tuple[int, ...]
    step_s: tuple[float, ...]

    @property
    def efficiency(self) -> tuple[float, ...]:
        """Samples a second of a rank, as a part of those on the fewest ranks."""
        return tuple(self.step_s[0] / step for step in self.step_s)


def scaling_curves(
    workload: Workload,
    cluster: ClusterConfig,
    chosen: Candidate,
    schedules: Sequence[ScheduleName],
    worlds: Sequence[int] = WORLDS,
) -> list[Curve]:
    """`chosen` with each schedule; schedules without micro-batches run at N = 1."""
    samples = max(1, workload.batch_samples // cluster.world)
    times: dict[str, list[float]] = {schedule: [] for schedule in schedules}
    for world in worlds:
        predictor = Predictor(replace(workload, batch_samples=samples * world), hosts_of(cluster, world))
        for schedule in schedules:
            parts = max(2, chosen.micro_batches) if SCHEDULES.find(schedule).splits else 1
            candidate = replace(
                chosen,
                schedule=schedule,
                micro_batches=min(parts, samples),
                window_cache=False,
                replicas=min(chosen.replicas, world),
            )
            times[schedule].append(predictor.predict(candidate).step_s)
    return [Curve(schedule, tuple(worlds), tuple(steps)) for schedule, steps in times.items()]
