"""TurboGR (arXiv 2605.13433): linearity 0.97 of FuXi-long on up to 128 NPUs, with assumptions.

Its table of overlaps contains computation and communication of a step at one scale. The growth of communication with
the number of devices is not published, so that of NestPipe's baseline is used, which ran on devices of the same vendor.
"""

from nestrec.pipeline import PipelineConfig
from nestrec.pipeline.schedule_spec import ScheduleName
from nestrec.planning.simulator.program_replay import Mesh, Replay, replay
from nestrec.planning.simulator.rehearsal import rehearse
from nestrec_bench.planning.papers.comparison import Comparison, PublishedResult, UniformCosts
from nestrec_bench.planning.papers.nestpipe import COMMUNICATION_SHARE, line_of

FEW, MANY = 32, 128
TABLE = {
    "FuXi-large": {"compute": 656.39, "communication": 326.56, "exposed": 38.78, "linearity": 0.94},
    "FuXi-long": {"compute": 1712.00, "communication": 436.71, "exposed": 97.88, "linearity": 0.97},
}
SPARSE_PART = (0.22 + 0.25) / 0.53
"""Fraction of communication that is embedding vectors and gradients, at a length of 2k."""

ASSUMPTIONS = (
    f"linearity is the throughput of {MANY} devices over {MANY // FEW} times that of {FEW}; the paper does not define "
    "it",
    f"the overlap table was measured on {MANY} devices; the paper does not state the number",
    f"{SPARSE_PART:.0%} of communication is embedding vectors and gradients (22 + 25 of 53% at 2k), the rest is dense",
    "all communication grows with devices as NestPipe's baseline does between 128 and 1,536 workers",
    "lookup takes no time: tables are on the device; ranks are balanced",
)


def turbogr() -> Comparison:
    """Simulate linearity and exposed communication of the two models of the overlap table."""
    rows = []
    for model, published in TABLE.items():
        many = simulated(model, MANY)
        parts = many.parts(0)
        rows.append(
            PublishedResult(
                table="end to end",
                quantity="linearity",
                method=model,
                published=published["linearity"],
                predicted=simulated(model, FEW).pace_s() / many.pace_s(),
            )
        )
        rows.append(
            PublishedResult(
                table="overlap",
                quantity="communication not overlapped, ms",
                method=model,
                published=published["exposed"],
                predicted=parts.exposed_communication_ns * 1e-6,
                is_relative=False,
            )
        )
    return Comparison(tuple(rows), ASSUMPTIONS)


def simulated(model: str, devices: int, schedule: ScheduleName = "semi_async") -> Replay:
    """Simulate the steps of a model, in seconds."""
    growth = line_of(COMMUNICATION_SHARE)
    communication = TABLE[model]["communication"] * 1e-3 * growth.at(devices) / growth.at(MANY)
    sparse = communication * SPARSE_PART / 2
    seconds = {
        "exchange_vectors": sparse,
        "exchange_gradients": sparse,
        "dense_reduce": communication * (1 - SPARSE_PART),
        "forward_backward": TABLE[model]["compute"] * 1e-3,
    }
    program = rehearse(PipelineConfig(schedule=schedule), micro_batches=1, steps=8)
    return replay(program, UniformCosts(seconds), Mesh(1, devices))
