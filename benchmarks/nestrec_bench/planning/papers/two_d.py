"""Two-dimensional sparse parallelism (arXiv 2508.03854): queries/s of the ExFM model, fitted at 256 and 512 devices.

With sharding over all devices, a step at 512 devices is longer than at 256 because its exchanges send messages to more
peers; the difference determines the cost of a message. In replica groups of 256 devices, the number of peers in these
exchanges is constant, and only the all-reduce of the dense gradients sends more messages with more hosts.
"""

from nestrec.embedding.routing.replica_key_union import ReplicaSyncConfig
from nestrec.pipeline import PipelineConfig
from nestrec.planning.simulator.program_replay import Mesh, replay
from nestrec.planning.simulator.rehearsal import rehearse
from nestrec_bench.planning.papers.comparison import Comparison, PublishedResult, UniformCosts

SHARDED_QPS = {256: 1.76e5, 512: 3.37e5, 1024: 5.61e5}
GROUPED_QPS = {256: 1.76e5, 512: 3.56e5, 1024: 6.76e5, 2048: 1.34e6, 4096: 2.53e6}
SCALING = {512: 100.0, 1024: 96.0, 2048: 95.0, 4096: 90.0}
"""Number of devices to the published percentage of linear scaling."""
GROUP = 256
DEVICES_PER_HOST = 8
EXCHANGES = 2
"""Number of exchanges on the critical path of a step: vectors and gradients."""
STEPS = 6

ASSUMPTIONS = (
    f"replica groups have {GROUP} devices at every scale, because the sharded and the grouped figure at {GROUP} are "
    "equal",
    f"{EXCHANGES} All2Alls (vectors, gradients) are on the critical path of a step, each with a message to every peer; "
    "that of the keys is prefetched, as in TorchRec's usual pipeline (with all three on the path: 99.0, 97.7, 95.1%)",
    "dense gradients are reduced by a ring over the hosts, with two messages for each further host",
    f"a host has {DEVICES_PER_HOST} devices; messages inside a host are free compared with those between hosts",
    "a message costs the same in an All2All and in a ring; it causes the entire growth of the sharded run from 256 to "
    "512",
    "averaging the replicas takes no time, because the grouped figure at 512 leaves none for it (3.56 > 2 x 1.76)",
    "there are no stragglers, because no published figure allows to fit them",
)


def two_d() -> Comparison:
    """Simulate the scaling of the grouped run, and of the sharded run that is used for fitting."""
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
                table="ExFM, sharded over all devices",
                quantity="queries/s",
                method=f"{devices} devices",
                published=qps,
                predicted=predicted,
            )
        )
    return Comparison(tuple(rows), ASSUMPTIONS)


def message_cost() -> float:
    """Return the cost of one message, in units of the step at 256 devices, from the sharded run with 256 more peers."""
    growth = 512 / 256 * SHARDED_QPS[256] / SHARDED_QPS[512] - 1.0
    hosts = 256 // DEVICES_PER_HOST
    return growth / (EXCHANGES * 256 + 2 * hosts)


def step_time(devices: int, group: int) -> float:
    """Return the duration of a synchronous step, in units of the step at 256 devices, if only messages differ.

    Args:
        devices: Number of devices.
        group: Number of devices per replica group.
    """
    message = message_cost()
    seconds = {
        "exchange_vectors": message * group,
        "exchange_gradients": message * group,
        "dense_reduce": 2.0 * message * devices / DEVICES_PER_HOST,
        "forward_backward": 1.0 - message * (EXCHANGES * 256 + 2 * 256 / DEVICES_PER_HOST),
    }
    sync = ReplicaSyncConfig(mode="weights") if devices > group else None
    program = rehearse(PipelineConfig(schedule="serial"), micro_batches=1, steps=STEPS, replica_sync=sync)
    return replay(program, UniformCosts(seconds), Mesh(devices // group, group)).pace_s()
