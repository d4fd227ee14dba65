"""Two-dimensional sparse parallelism (arXiv 2508.03854): queries a second of the ExFM model, fitted on 256 and 512.

Sharded over everyone, a step at 512 devices is longer than at 256 by the messages that its exchanges send to more
peers: that gives the cost of a message. In replica groups of 256 the exchanges keep their peers, and only the sum over
everyone of the dense gradients still sends more messages when there are more hosts.
"""

from nestrec.embedding.routing.replica_key_union import ReplicaSyncConfig
from nestrec.pipeline import PipelineConfig
from nestrec.planning.simulator.program_replay import Mesh, replay
from nestrec.planning.simulator.rehearsal import rehearse
from nestrec_bench.planning.papers.comparison import Comparison, PublishedResult, UniformCosts

SHARDED_QPS = {256: 1.76e5, 512: 3.37e5, 1024: 5.61e5}
GROUPED_QPS = {256: 1.76e5, 512: 3.56e5, 1024: 6.76e5, 2048: 1.34e6, 4096: 2.53e6}
SCALING = {512: 100.0, 1024: 96.0, 2048: 95.0, 4096: 90.0}
"""percent of linear, as printed"""
GROUP = 256
DEVICES_A_HOST = 8
EXCHANGES = 2
"""on the path of a step: vectors, gradients"""
STEPS = 6

ASSUMPTIONS = (
    f"replica groups have {GROUP} devices at every scale: the sharded and the grouped figure at {GROUP} are the same",
    f"{EXCHANGES} All2Alls (vectors, gradients) are on the path of a step, each with a message to every peer; that of "
    "the keys is prefetched, as TorchRec's usual pipeline does (with all three on the path: 99.0, 97.7, 95.1%)",
    "dense gradients are summed by a ring over the hosts, with two messages for each further host",
    f"{DEVICES_A_HOST} devices a host; messages inside a host cost nothing beside those between hosts",
    "a message costs the same in an All2All and in a ring; the whole growth from 256 to 512 of the sharded run is its",
    "the average of the replicas costs what the grouped figure at 512 leaves for it: nothing (3.56 > 2 x 1.76)",
    "no stragglers: nothing is published to fit them to",
)


def two_d() -> Comparison:
    """Scaling of the grouped run, with what was fitted."""
    rows = []
    for devices, published in SCALING.items():
        predicted = 100.0 * step_time(GROUP, GROUP) / step_time(devices, GROUP)
        is_fitted = devices <= 512
        rows.append(
            PublishedResult(
                table="ExFM, 2D",
                quantity="% of linear from 256 devices",
                method=f"{devices} devices",
                published=published,
                predicted=predicted,
                bound=None if is_fitted else 5.0,
                is_relative=False,
            )
        )
    for devices, qps in SHARDED_QPS.items():
        predicted = SHARDED_QPS[256] * devices / 256 * step_time(256, 256) / step_time(devices, devices)
        rows.append(
            PublishedResult(
                table="ExFM, sharded over everyone",
                quantity="queries a second",
                method=f"{devices} devices",
                published=qps,
                predicted=predicted,
            )
        )
    return Comparison(tuple(rows), ASSUMPTIONS)


def message_cost() -> float:
    """Of one message, in units of the step at 256 devices: sharded over everyone, 256 more peers."""
    growth = 512 / 256 * SHARDED_QPS[256] / SHARDED_QPS[512] - 1.0
    hosts = 256 // DEVICES_A_HOST
    return growth / (EXCHANGES * 256 + 2 * hosts)


def step_time(devices: int, group: int) -> float:
    """A synchronous step of `devices` in groups of `group`, where everything but messages is the same."""
    message = message_cost()
    seconds = {
        "exchange_vectors": message * group,
        "exchange_gradients": message * group,
        "dense_reduce": 2.0 * message * devices / DEVICES_A_HOST,
        "forward_backward": 1.0 - message * (EXCHANGES * 256 + 2 * 256 / DEVICES_A_HOST),
    }
    sync = ReplicaSyncConfig(mode="weights") if devices > group else None
    program = rehearse(PipelineConfig(schedule="serial"), micro_batches=1, steps=STEPS, replica_sync=sync)
    return replay(program, UniformCosts(seconds), Mesh(devices // group, group)).pace_s()
