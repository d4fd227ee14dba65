"""Tests of the workload of the comparison with TorchRec, the job of nestrec, and the computed ratios."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.report.result_file import make_frame
from nestrec_bench.external.external_bench import (
    PeersBenchConfig,
    find_python,
    measure_peers,
    rows_of,
    short_rows,
    write_page,
)
from nestrec_bench.external.external_workload import BAG, SEQUENCE, PeersWorkload, WorkloadConfig
from nestrec_bench.external.training_job import DENSE_LEARNING_RATE, ROW_EPS, ROW_LEARNING_RATE, DensePart, NestrecJob

SMALL = WorkloadConfig(num_rows=500, batch=10, mean_length=6.0, max_length=16, dim=8)


def test_peers_bench_batches_are_unchanged():
    assert PeersWorkload(WorkloadConfig()).fingerprint() == "1b72c0b1d6052832"


def test_peers_initial_rows_do_not_depend_on_sharding():
    workload = PeersWorkload(WorkloadConfig(num_rows=200_000, dim=2))
    unsharded = workload.first_rows(1, 0, 200_000)
    parts = [workload.first_rows(1, a, b) for a, b in ((0, 70_000), (70_000, 70_001), (70_001, 200_000))]
    assert torch.equal(torch.cat(parts), unsharded)
    assert not torch.equal(workload.first_rows(0, 0, 9), unsharded[:9])


def reference_losses(workload, batches, dense, num_steps):
    """Train the job in PyTorch, with unsharded tables and explicit row-wise AdaGrad, and return the losses."""
    model = DensePart(workload.cfg, dense)
    adam = torch.optim.Adam(model.parameters(), lr=DENSE_LEARNING_RATE)
    weights = [workload.first_rows(t, 0, workload.cfg.num_rows) for t in range(2)]
    sums = [torch.zeros(workload.cfg.num_rows, 1) for _ in range(2)]
    losses = []
    for step in range(num_steps):
        batch = batches[step % len(batches)]
        leaves = [w.clone().requires_grad_() for w in weights]
        tokens = leaves[0][batch.keys[SEQUENCE]]
        bags = [rows.sum(0) for rows in leaves[1][batch.keys[BAG]].split(batch.lengths[BAG].tolist())]
        adam.zero_grad()
        loss = model(tokens, batch.lengths[SEQUENCE], torch.stack(bags), batch.dense, batch.label)
        loss.backward()
        adam.step()
        for weight, total, leaf in zip(weights, sums, leaves, strict=True):
            total.add_(leaf.grad.square().mean(1, keepdim=True))
            weight.sub_(ROW_LEARNING_RATE * leaf.grad / (total.sqrt() + ROW_EPS))
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dense", ["mlp", "bucket"])
def test_peers_losses_equal_pytorch_reference(dense):
    workload = PeersWorkload(SMALL)
    batches = [workload.batch(0, step) for step in range(3)]
    job = NestrecJob(workload, batches, dense, Topology.single())
    for _ in range(6):
        job.step()
    found = torch.stack(job.losses).tolist()
    assert found == pytest.approx(reference_losses(workload, batches, dense, 6), abs=2e-6)
    assert len(set(found)) == 6
    assert {"embedding.exchange_keys", "forward_backward", "embedding.write_back"} <= job.parts_ms().keys()


def system_of(name, rates):
    return {
        "system": name,
        "version": "1",
        "mode": "m",
        "samples_per_s_rounds": rates,
        "losses": [0.7, 0.6],
        "cpu_ms": 3.0,
        "parts_ms": None,
    }


def test_peers_ratios_are_computed_within_rounds():
    ours, theirs = rows_of("mlp", [system_of("nestrec", [30.0, 20.0, 90.0]), system_of("other", [10.0, 10.0, 60.0])])
    assert (ours["ratio"], ours["paired_ratio"]) == (1.0, 1.0)
    assert theirs["ratio"] == 3.0
    assert theirs["paired_ratio"] == 2.0
    assert theirs["paired_ratio_spread"] == [1.75, 2.5]
    assert theirs["samples_per_s_spread"] == np.quantile([10.0, 10.0, 60.0], [0.25, 0.75]).tolist()
    assert [row["system"] for row in short_rows([ours, theirs])] == ["nestrec m", "other m"]


@pytest.mark.parametrize("options", [{"dense": ("mpl",)}, {"modes": ("plane",)}, {"rounds": 0}, {"steps": -1}])
def test_peers_bench_rejects_invalid_options(options):
    with pytest.raises(UserError) as error:
        list(measure_peers(PeersBenchConfig(**options)))
    assert error.value.option.startswith(next(iter(options)))


def test_peers_bench_rejects_python_without_torchrec():
    without = Path(sys.executable)
    if find_python(None) == without:
        pytest.skip("TorchRec is installed here")
    with pytest.raises(UserError, match="make torchrec"):
        find_python(without)


def test_peers_page_keeps_text_around_tables(tmp_path):
    rows = rows_of("mlp", [system_of("nestrec", [30.0]) | {"parts_ms": {"embedding.exchange_keys": [2.0]}}])
    frame = make_frame(bench="peers", command="nestrec bench peers", rows=rows)
    page = tmp_path / "page.md"
    write_page(page, frame)
    page.write_text(f"about\n{page.read_text()}\nafter\n")
    before = page.read_text()
    write_page(page, frame)
    assert page.read_text() == before
    assert "| part | ms |\n| --- | --- |\n| embedding.exchange_keys | 2.00 |" in before
