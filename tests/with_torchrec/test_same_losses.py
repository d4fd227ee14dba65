"""Both systems train the same job: their losses agree step by step."""

import sys

import pytest

from nestrec_bench.external.external_bench import PeersBench, measure_peers
from nestrec_bench.external.external_ranks import global_losses
from nestrec_bench.external.external_workload import PeersWorkload, WorkloadConfig
from nestrec_bench.external.torchrec_job import TORCHREC_MODES, TorchRecJob
from nestrec_bench.external.training_job import NestrecJob
from support.rank_pool import RankPool

EXPECTED = [0.692587, 0.709074, 0.719870, 0.716563, 0.700657, 0.690559, 0.690726, 0.693335]
"""Of a program in plain torch, on one process, for the `mlp` job on two ranks."""
NUM_STEPS = 8


def losses_of_all(topology, dense):
    """On each rank: system to its losses, on a small job."""
    workload = PeersWorkload(WorkloadConfig(num_rows=3000, batch=24, mean_length=12.0, max_length=40, dim=32))
    batches = [workload.batch(topology.rank, step) for step in range(5)]
    jobs = [NestrecJob(workload, batches, dense, topology)]
    jobs += [TorchRecJob(workload, batches, dense, mode) for mode in TORCHREC_MODES]
    for _ in range(NUM_STEPS):
        for job in jobs:
            job.step()
    return {job.mode: global_losses(job, topology, NUM_STEPS) for job in jobs}


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize("dense", ["mlp", "bucket"])
def test_every_mode_of_torchrec_gives_our_losses(pool, dense):
    found = pool.run(losses_of_all, dense)[0]
    assert len(set(found["serial"])) == NUM_STEPS, "a job that does not learn would agree too"
    for mode in TORCHREC_MODES:
        assert found[mode] == pytest.approx(found["serial"], abs=3e-6), mode


@pytest.mark.timeout(600)
def test_the_benchmark_gives_the_known_losses_to_six_digits():
    bench = PeersBench(dense=("mlp",), rounds=1, steps=4, modes=("plain",), python=sys.executable)
    rows = list(measure_peers(bench))
    assert [row["mode"] for row in rows] == ["serial", "serial_gloo", "plain"]
    for row in rows:
        assert row["losses"] == pytest.approx(EXPECTED, abs=1.1e-6)
