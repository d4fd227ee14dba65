"""The sample cost model on a GPU is fitted to CUDA event times, without synchronizing inside a step."""

import json

import pytest

from nestrec.distributed import Topology
from nestrec.training.trainer import Trainer
from support.tiny_runs import config_of, make_datasets

pytestmark = pytest.mark.gpu


def test_cost_model_is_fitted_on_gpu(tmp_path):
    make_datasets(tmp_path)
    wrong = {"balance.cost.token": 1e-9, "balance.cost.token_squared": 1.0}
    wide = {"task.encoder.dim": 32, "task.encoder.head_dim": 16}
    options = {
        **wide,
        **wrong,
        "balance.policy": "refined",
        "balance.fit_every_steps": 40,
        "training.device": "cuda",
        "training.max_steps": 80,
        "training.epochs": 1000,
        "training.eval_every_epochs": 0,
    }
    trainer = Trainer(config_of("hstu", tmp_path, options), tmp_path / "run", Topology.single("cuda"))
    measurements = []
    decide = trainer.balance_controller.decide

    def recording_decide(*arguments):
        measurements.extend(trainer.balance_controller._measured)
        return decide(*arguments)

    trainer.balance_controller.decide = recording_decide
    trainer.train()
    assert len(measurements) >= 20
    assert all(0 < measured.compute_s < 10 and measured.tokens > 0 for measured in measurements)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    step_ms = [record["step_ms"] for record in records if record["kind"] == "step"][-1]
    mean_ms = 1e3 * sum(measured.compute_s for measured in measurements) / len(measurements)
    assert 0.05 * step_ms < mean_ms < 1.5 * step_ms, "compute time is a part of the step time"
