"""nestrec and TorchRec train the same job; their losses agree at every step."""

import sys

import pytest

from nestrec_bench.external.external_bench import PeersBenchConfig, measure_peers
from nestrec_bench.external.external_ranks import global_losses
from nestrec_bench.external.external_workload import PeersWorkload, WorkloadConfig
from nestrec_bench.external.torchrec_job import TORCHREC_MODES, TorchRecJob
from nestrec_bench.external.training_job import NestrecJob
from support.rank_pool import RankPool

EXPECTED = [0.692587, 0.709074, 0.719870, 0.716563, 0.700657, 0.690559, 0.690726, 0.693335]
"""Losses of the `mlp` job on two ranks, computed by a plain PyTorch program in one process."""
NUM_STEPS = 8


def losses_by_mode(topology, dense):
    """Train a small job on each rank; return the global losses of each step, by mode."""
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
def test_torchrec_modes_have_equal_losses(pool, dense):
    losses = pool.run(losses_by_mode, dense)[0]
    assert len(set(losses["serial"])) == NUM_STEPS, "losses of a job that does not learn would be equal, too"
    for mode in TORCHREC_MODES:
        assert losses[mode] == pytest.approx(losses["serial"], abs=3e-6), mode


@pytest.mark.timeout(600)
def test_torchrec_benchmark_losses_are_known():
    bench = PeersBenchConfig(dense=("mlp",), rounds=1, steps=4, modes=("plain",), python=sys.executable)
    rows = list(measure_peers(bench))
    assert [row["mode"] for row in rows] == ["serial", "serial_gloo", "plain"]
    for row in rows:
        assert row["losses"] == pytest.approx(EXPECTED, abs=1.1e-6)
