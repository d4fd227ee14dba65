"""Negatives on several ranks: schedules agree with every option, and all ranks choose the same loss variant."""

from pathlib import Path
from typing import Any

from nestrec.distributed import Topology
from nestrec.tasks.loss_options import LossShape, choose_variant
from nestrec.training.state import run_digest
from nestrec.training.trainer import Trainer
from support.tiny_runs import config_of, make_datasets

RUN = {
    "training.max_steps": 9,
    "training.epochs": 9,
    "batch.num_micro_batches": 3,
    "task.negatives.logit_sharing": 2,
    "task.negatives.sampler": "popularity",
    "task.negatives.lookup_dtype": "float16",
    "task.negatives.loss_variant": "segments",
    "task.negatives.segment_tokens": 5,
    "pipeline.window_cache": True,
}


def train(topology: Topology, data: str, folder: str, schedule: str) -> int:
    cfg = config_of("hstu", Path(data), {**RUN, "pipeline.schedule": schedule})
    trainer = Trainer(cfg, Path(folder), topology)
    trainer.train()
    return trainer.session.engine.statistics.vector_bytes


def choose(topology: Topology) -> tuple[str, dict[str, float]]:
    # The first rank does not have the memory for a variant that the second rank could choose.
    shape: dict[str, Any] = {"tokens": 50, "negatives": 20, "sharing": 2, "rows": 300, "dim": 8, "segment_tokens": 7}
    memory_gib = 0.0 if topology.rank == 0 else None
    return choose_variant(LossShape(**shape, kind="sampled_softmax", dtype="float32"), topology, memory_gib)


def test_negatives_options_on_two_ranks_equal_serial(pools, tmp_path):
    make_datasets(tmp_path / "data")
    vector_bytes = {}
    digests = {}
    for schedule in ("serial", "nested"):
        vector_bytes[schedule] = pools[2].run(train, str(tmp_path / "data"), str(tmp_path / schedule), schedule)
        digests[schedule] = run_digest(tmp_path / schedule)
    assert digests["nested"] == digests["serial"]
    assert vector_bytes["nested"] == vector_bytes["serial"]


def test_loss_variant_choice_fits_all_ranks(pools):
    first, second = pools[2].run(choose)
    assert first == second
    assert first[0] == "fused"
    assert set(first[1]) == {"fused"}
