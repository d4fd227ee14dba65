"""Negatives over ranks: runs with every option agree between schedules, and a measured choice is one for all."""

from pathlib import Path
from typing import Any

from nestrec.distributed import Topology
from nestrec.tasks.loss_options import LossShape, choose_variant
from nestrec.training.state import run_digest
from nestrec.training.trainer import Trainer
from support.tiny_runs import config_of, make_datasets

RUN = {"training.max_steps": 9, "training.epochs": 9, "batch.micro_batches": 3, "task.negatives.sharing": 2,
       "task.negatives.sampler": "popularity", "task.negatives.lookup": "float16", "task.negatives.variant": "segments",
       "task.negatives.segment_tokens": 5, "pipeline.window_cache": True}  # fmt: skip


def train(topology: Topology, data: str, folder: str, schedule: str) -> int:
    cfg = config_of("hstu", Path(data), {**RUN, "pipeline.schedule": schedule})
    trainer = Trainer(cfg, Path(folder), topology)
    trainer.train()
    return trainer.session.engine.statistics.vector_bytes


def choose(topology: Topology) -> tuple[str, dict[str, float]]:
    # The first rank has no room for what the second could take.
    shape: dict[str, Any] = {"tokens": 50, "negatives": 20, "sharing": 2, "rows": 300, "dim": 8, "segment_tokens": 7}
    memory_gib = 0.0 if topology.rank == 0 else None
    return choose_variant(LossShape(**shape, kind="sampled_softmax", dtype="float32"), topology, memory_gib)


def test_every_option_over_two_ranks_is_the_serial_run(pools, tmp_path):
    make_datasets(tmp_path / "data")
    moved, digests = {}, {}
    for schedule in ("serial", "nested"):
        moved[schedule] = pools[2].run(train, str(tmp_path / "data"), str(tmp_path / schedule), schedule)
        digests[schedule] = run_digest(tmp_path / schedule)
    assert digests["nested"] == digests["serial"]
    assert moved["nested"] == moved["serial"]


def test_ranks_choose_one_variant_that_fits_all_of_them(pools):
    first, second = pools[2].run(choose)
    assert first == second
    assert first[0] == "fused"
    assert set(first[1]) == {"fused"}
