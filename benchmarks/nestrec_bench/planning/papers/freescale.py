"""FreeScale (arXiv 2604.24073): reduction of exposed embedding communication by 90.3% on 256 GPUs, with assumptions.

The paper states neither the share of communication in the step nor the collision rate of that run. Given both, the
reduction follows from the schedule `priority`: the exchange of rows that consecutive batches share stays exposed.
"""

from nestrec.pipeline import PipelineConfig
from nestrec.pipeline.schedule_spec import ScheduleName
from nestrec.planning.simulator.program_replay import Mesh, replay
from nestrec.planning.simulator.rehearsal import rehearse
from nestrec_bench.planning.papers.comparison import Comparison, PublishedResult, UniformCosts

GPUS = 256
PUBLISHED_CUT = 90.3
SHARES = {
    "collision share 3% (low single digits)": 0.03,
    "collision share 12%": 0.12,
    "collision share 14% (P99)": 0.14,
}
COMMUNICATION = 0.35
"""Total communication time, as a fraction of the computation time."""
EXPOSED_MS = (111.0, 13.0)
"""Exposed communication of the synthetic test with histories of 8K, before and after."""

ASSUMPTIONS = (
    "the collision share of the main result's run is not published: one source has low single digits, another 12% with "
    "a P99 of 14%; the reduction is computed for each",
    f"total embedding communication is {COMMUNICATION:.0%} of the computation; the reduction does not depend on it as "
    "long as the deferred exchanges can overlap with the computation",
    "lookups, dense all-reduce and stragglers take no time, because the main result is about exposed communication "
    "only",
    "the exchanges of vectors and of gradients take the same time",
)


def freescale() -> Comparison:
    """Simulate the main result and the synthetic test for each published collision share."""
    rows = []
    before = exposed("serial", 0.0)
    for method, share in SHARES.items():
        after = exposed("priority", share)
        rows.append(
            PublishedResult(
                table=f"production, {GPUS} GPUs",
                quantity="exposed communication cut, %",
                method=method,
                published=PUBLISHED_CUT,
                predicted=100.0 * (1.0 - after / before),
                is_relative=False,
            )
        )
        rows.append(
            PublishedResult(
                table="synthetic, histories of 8K",
                quantity="exposed communication left of 111 ms, ms",
                method=method,
                published=EXPOSED_MS[1],
                predicted=EXPOSED_MS[0] * after / before,
                is_relative=False,
            )
        )
    return Comparison(tuple(rows), ASSUMPTIONS)


def exposed(schedule: ScheduleName, shared: float) -> float:
    """Return the exposed communication of a step, in units of the computation time."""
    seconds = {"exchange_vectors": COMMUNICATION / 2, "exchange_gradients": COMMUNICATION / 2, "forward_backward": 1.0}
    program = rehearse(PipelineConfig(schedule=schedule), micro_batches=1, steps=8)
    done = replay(program, UniformCosts(seconds, shared=shared), Mesh(1, GPUS))
    return done.parts(0).exposed_communication_ns * 1e-9
