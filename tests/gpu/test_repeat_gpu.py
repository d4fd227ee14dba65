"""Two runs with the same seed have bitwise identical weights on a GPU."""

from pathlib import Path

import pytest

from nestrec.distributed import Topology
from nestrec.training.state import run_digest
from nestrec.training.trainer import Trainer
from support.tiny_runs import FAMILIES, config_of, make_datasets

pytestmark = pytest.mark.gpu
WIDE = {
    "hstu": {"task.encoder.dim": 32, "task.encoder.head_dim": 16, "task.negatives.loss_variant": "fused"},
    "sasrec": {"task.encoder.dim": 32, "task.encoder.ffn_dim": 32},
    "ranking": {"task.encoder.dim": 32, "task.encoder.head_dim": 16},
    "rows": {},
}


HALF = {"tables.items.dtype": "bfloat16"}


@pytest.mark.parametrize(("family", "tables"), [*((family, {}) for family in FAMILIES), ("hstu", HALF)])
def test_training_is_deterministic_for_a_seed(tmp_path: Path, family: str, tables: dict[str, str]) -> None:
    make_datasets(tmp_path / "data", num_topics=5)
    more = {**WIDE[family], **tables, "training.device": "cuda", "training.max_steps": 40, "training.epochs": 100}
    more |= {"training.eval_every_epochs": 0, "batch.batch_size": 32}
    for name in ("a", "b"):
        Trainer(config_of(family, tmp_path / "data", more), tmp_path / name, Topology.single("cuda")).train()
    first, second = run_digest(tmp_path / "a"), run_digest(tmp_path / "b")
    assert {name for name in first if first[name] != second[name]} == set()
