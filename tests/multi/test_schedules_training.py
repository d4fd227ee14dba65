"""The training loop over ranks and under a pipelined schedule: reports, evaluations and saves in the middle of it."""

from pathlib import Path
from typing import Any

import pytest

from nestrec.distributed import Topology
from nestrec.testing.tiny_runs import config_of, make_datasets
from nestrec.training.run_digest import run_digest
from nestrec.training.trainer import Trainer

RUN = {
    "training.max_steps": 23,
    "training.epochs": 20,
    "training.checkpoint_every_steps": 7,
    "batch.micro_batches": 3,
    "training.evaluate_every_epochs": 4,
}


def train(topology: Topology, data: str, folder: str, more: dict[str, Any]) -> list[str]:
    start = topology.log.count
    Trainer(config_of("hstu", Path(data), {**RUN, **more}), Path(folder), topology).train()
    return topology.log.entries()[-(topology.log.count - start) :]


@pytest.mark.parametrize("mode", ["read", "exchange"])
def test_a_balanced_run_on_two_ranks_is_the_serial_run_and_its_collectives_have_one_order(pools, tmp_path, mode):
    make_datasets(tmp_path / "data")
    more = {"balance.policy": "refined", "balance.mode": mode, "pipeline.window_cache": True}
    digests = {}
    for schedule in ("serial", "nested"):
        folder = tmp_path / schedule
        issued = pools[2].run(train, str(tmp_path / "data"), str(folder), {**more, "pipeline.schedule": schedule})
        digests[schedule] = run_digest(folder)
        mine, theirs = ([entry for entry in log if not entry.startswith("samples.")] for log in issued)
        assert mine == theirs
    assert digests["nested"] == digests["serial"]
