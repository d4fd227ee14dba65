"""The job that systems are compared on, and the arithmetic of the comparison."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.report.result_file import make_frame
from nestrec_bench.external.external_bench import (
    PeersBench,
    find_python,
    measure_peers,
    rows_of,
    short_rows,
    write_page,
)
from nestrec_bench.external.external_workload import BAG, SEQUENCE, PeersWorkload, WorkloadConfig
from nestrec_bench.external.training_job import DENSE_LEARNING_RATE, ROW_EPS, ROW_LEARNING_RATE, DensePart, NestrecJob

SMALL = WorkloadConfig(num_rows=500, batch=10, mean_length=6.0, max_length=16, dim=8)


def test_the_batches_are_those_that_published_figures_were_measured_on():
    assert PeersWorkload(WorkloadConfig()).fingerprint() == "1b72c0b1d6052832"


def test_first_rows_do_not_depend_on_how_a_table_is_cut():
    workload = PeersWorkload(WorkloadConfig(num_rows=200_000, dim=2))
    whole = workload.first_rows(1, 0, 200_000)
    parts = [workload.first_rows(1, a, b) for a, b in ((0, 70_000), (70_000, 70_001), (70_001, 200_000))]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(workload.first_rows(0, 0, 9), whole[:9])


def plain_losses(workload, batches, dense, num_steps):
    """The job in plain torch, with whole tables and row-wise AdaGrad written out."""
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
def test_our_losses_are_those_of_plain_torch(dense):
    workload = PeersWorkload(SMALL)
    batches = [workload.batch(0, step) for step in range(3)]
    job = NestrecJob(workload, batches, dense, Topology.single())
    for _ in range(6):
        job.step()
    found = torch.stack(job.losses).tolist()
    assert found == pytest.approx(plain_losses(workload, batches, dense, 6), abs=2e-6)
    assert len(set(found)) == 6
    assert {"embedding.route", "compute", "embedding.write_back"} <= job.parts_ms().keys()


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


def test_ratios_are_taken_within_rounds():
    ours, theirs = rows_of("mlp", [system_of("nestrec", [30.0, 20.0, 90.0]), system_of("other", [10.0, 10.0, 60.0])])
    assert (ours["ratio"], ours["paired_ratio"]) == (1.0, 1.0)
    assert theirs["ratio"] == 3.0
    assert theirs["paired_ratio"] == 2.0
    assert theirs["paired_ratio_spread"] == [1.75, 2.5]
    assert theirs["samples_per_s_spread"] == np.quantile([10.0, 10.0, 60.0], [0.25, 0.75]).tolist()
    assert [row["system"] for row in short_rows([ours, theirs])] == ["nestrec m", "other m"]


@pytest.mark.parametrize("wrong", [{"dense": ("mpl",)}, {"modes": ("plane",)}, {"rounds": 0}, {"steps": -1}])
def test_what_cannot_be_measured_is_named(wrong):
    with pytest.raises(UserError) as caught:
        list(measure_peers(PeersBench(**wrong)))
    assert caught.value.field.startswith(next(iter(wrong)))


def test_a_python_without_torchrec_is_refused():
    without = Path(sys.executable)
    if find_python(None) == without:
        pytest.skip("TorchRec is installed here")
    with pytest.raises(UserError, match="make torchrec"):
        find_python(without)


def test_a_page_keeps_what_people_wrote_around_its_tables(tmp_path):
    rows = rows_of("mlp", [system_of("nestrec", [30.0]) | {"parts_ms": {"embedding.route": [2.0]}}])
    frame = make_frame(bench="peers", command="nestrec bench peers", rows=rows)
    page = tmp_path / "page.md"
    write_page(page, frame)
    page.write_text(f"about\n{page.read_text()}\nafter\n")
    before = page.read_text()
    write_page(page, frame)
    assert page.read_text() == before
    assert "| part | ms |\n| --- | --- |\n| embedding.route | 2.00 |" in before
