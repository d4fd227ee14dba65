"""The training loop on several ranks with pipelined schedules, including reports, evaluations and checkpoints."""

from pathlib import Path
from typing import Any

import pytest

from nestrec.distributed import Topology
from nestrec.training.state import run_digest
from nestrec.training.trainer import Trainer
from support.featured_log import EVENT_FEATURES, ITEM_FEATURES, USER_FEATURES, write_featured_log
from support.tiny_runs import config_of, make_datasets

RUN = {
    "training.max_steps": 23,
    "training.epochs": 20,
    "training.checkpoint_every_steps": 7,
    "batch.num_micro_batches": 3,
    "training.eval_every_epochs": 4,
}


def train(topology: Topology, data: str, folder: str, more: dict[str, Any]) -> list[str]:
    start = topology.log.count
    Trainer(config_of("hstu", Path(data), {**RUN, **more}), Path(folder), topology).train()
    return topology.log.entries()[-(topology.log.count - start) :]


@pytest.mark.parametrize("mode", ["read", pytest.param("exchange", marks=pytest.mark.slow)])
def test_schedules_balanced_run_equals_serial(pools, tmp_path, mode):
    make_datasets(tmp_path / "data")
    more = {"balance.policy": "refined", "balance.mode": mode, "pipeline.window_cache": True}
    digests = {}
    for schedule in ("serial", "nested"):
        folder = tmp_path / schedule
        issued = pools[2].run(train, str(tmp_path / "data"), str(folder), {**more, "pipeline.schedule": schedule})
        digests[schedule] = run_digest(folder)
        first, second = ([entry for entry in log if not entry.startswith("samples.")] for log in issued)
        assert first == second
    assert digests["nested"] == digests["serial"]


FEATURES = {
    "task.inputs.item_features": ",".join(ITEM_FEATURES),
    "task.inputs.event_features": ",".join(EVENT_FEATURES),
    "task.inputs.user_features": ",".join(USER_FEATURES),
    "task.inputs.context_features": "device,place",
    "task.inputs.target_actions": "click,buy",
    "tables.tags.pooling": "sum",
    "tables.brand.dim": "3",
    "tables.*.dtype": "bfloat16",
    "tables.items.id_mode": "dynamic",
    "training.max_steps": "9",
    "training.eval_every_epochs": "0",
}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_schedules_with_all_feature_kinds_equal_serial(pools, tmp_path, world):
    data = write_featured_log(tmp_path / "log")
    digests = set()
    for schedule in ("serial", "dual_buffer", "frozen_window", "nested", "priority"):
        more = {**FEATURES, "data.folder": str(data), "pipeline.schedule": schedule}
        pools[world].run(train, str(tmp_path), str(tmp_path / schedule), more)
        digests.add(str(run_digest(tmp_path / schedule)))
    assert len(digests) == 1
