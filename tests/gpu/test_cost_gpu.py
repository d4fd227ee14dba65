"""Costs of samples on a GPU: fitted to the times of events, which nobody waits for inside a step."""

import json

import pytest

from nestrec.distributed import Topology
from nestrec.training.trainer import Trainer
from support.tiny_runs import config_of, make_datasets

pytestmark = pytest.mark.gpu


def test_a_run_on_a_gpu_measures_what_its_samples_cost(tmp_path):
    make_datasets(tmp_path)
    wrong = {"balance.cost.token": 1e-9, "balance.cost.token_squared": 1.0}
    wide = {"task.encoder.dim": 32, "task.encoder.head_dim": 16}
    given = {
        **wide,
        **wrong,
        "balance.policy": "refined",
        "balance.fit_every_steps": 40,
        "training.device": "cuda",
        "training.max_steps": 80,
        "training.epochs": 1000,
        "training.evaluate_every_epochs": 0,
    }
    trainer = Trainer(config_of("hstu", tmp_path, given), tmp_path / "run", Topology.single("cuda"))
    seen = []
    decide = trainer.balancing.decide

    def decided(*asked):
        seen.extend(trainer.balancing._measured)
        return decide(*asked)

    trainer.balancing.decide = decided
    trainer.train()
    assert len(seen) >= 20
    assert all(0 < measured.compute_s < 10 and measured.tokens > 0 for measured in seen)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    step_ms = [record["step_ms"] for record in records if record["kind"] == "step"][-1]
    mean_ms = 1e3 * sum(measured.compute_s for measured in seen) / len(seen)
    assert 0.05 * step_ms < mean_ms < 1.5 * step_ms, "computing is a part of a step"
