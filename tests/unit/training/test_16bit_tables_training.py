"""--tables.NAME.dtype: half-precision tables are trained, resumed and exported; invalid uses are rejected."""

from pathlib import Path

import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.checkpoint import CheckpointManager
from nestrec.distributed import Topology
from nestrec.exporters.servable_writer import export_run
from nestrec.inference.recommender import load
from nestrec.training.state import run_digest
from nestrec.training.trainer import Trainer
from support.fail_points import armed
from support.tiny_runs import config_of, make_datasets

RUN = {"training.max_steps": 7, "training.epochs": 9, "training.checkpoint_every_steps": 3}


@pytest.fixture(scope="module")
def tiny_data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return folder


def trainer_of(family: str, data: Path, folder: Path, **more: object) -> Trainer:
    overrides = {**RUN, **{name.replace("__", "."): value for name, value in more.items()}}
    return Trainer(config_of(family, data, overrides), folder, Topology.single())


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("hstu", {"tables__items__dtype": "bfloat16"}),
        ("ranking", {"tables__items__dtype": "float16", "tables__item_topic__dtype": "bfloat16"}),
        ("rows", {"tables__categories__dtype": "bfloat16"}),
    ],
)
def test_half_precision_tables_resume_bitwise_nested_and_serial(tiny_data, tmp_path, family, options):
    class Crash(Exception):
        pass

    def crash() -> None:
        raise Crash

    trainer_of(family, tiny_data, tmp_path / "serial", pipeline__schedule="serial", **options).train()
    with armed("train.step", crash, at=5), pytest.raises(Crash):
        trainer_of(family, tiny_data, tmp_path / "nested", pipeline__schedule="nested", **options).train()
    trainer_of(family, tiny_data, tmp_path / "nested", pipeline__schedule="nested", **options).train()
    assert run_digest(tmp_path / "nested") == run_digest(tmp_path / "serial")
    restored = CheckpointManager(tmp_path / "nested" / "checkpoints").restore_latest()
    assert restored is not None
    for name, dtype in options.items():
        for chunk in restored.rows(name.split("__")[1]):
            assert chunk["weight"].dtype == getattr(torch, str(dtype))
            assert all(column.dtype == torch.float32 for key, column in chunk.items() if key.startswith("state_"))


def test_half_precision_tables_export_recommends_as_evaluated(tiny_data, tmp_path):
    trainer = trainer_of("hstu", tiny_data, tmp_path / "run", tables__items__dtype="bfloat16")
    trainer.train()
    evaluation = trainer.evaluate("test")
    export_run(tmp_path / "run", tmp_path / "model")
    model = load(tmp_path / "model")
    assert model.servable.tables["items"].weight.dtype == torch.bfloat16
    keys = model.servable.item_keys
    ranks = evaluation.details["rank/model"]
    for user, rank in zip(evaluation.details["users"][:10], ranks[:10], strict=True):
        lists = trainer.session.dataset.rows(user[None]).lists
        items = [keys[i - 1] for i in lists["item_ids"][0]]
        times = lists["timestamps_ms"][0].tolist()
        history = {"items": items[:-1], "times_ms": times[:-1], "now_ms": times[-1]}
        recommended = model.recommend(history, k=10, exclude_seen=False, exclude=items[-13:-1]).items
        assert (recommended.index(items[-1]) + 1 if items[-1] in recommended else 0) == rank


def test_half_precision_tables_cannot_change_on_resume(tiny_data, tmp_path):
    trainer_of("hstu", tiny_data, tmp_path, tables__items__dtype="bfloat16").train()
    with pytest.raises(UserError, match="cannot change when a run resumes"):
        trainer_of("hstu", tiny_data, tmp_path, tables__items__dtype="float16", training__max_steps=9).train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tables__item__dtype": "bfloat16"}, "[Dd]id you mean 'items'"),
        ({"tables__items__dtype": "int8"}, "is not one of the choices|invalid value"),
        ({"tables__items__dtype": "bfloat16", "training__weight_dtype": "float64"}, "requires float64 rows"),
        ({"tables__items__dtype": "bfloat16", "task__negatives__lookup_dtype": "float16"}, "already sent in 16 bits"),
    ],
)
def test_half_precision_tables_invalid_options_are_rejected(tiny_data, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        trainer_of("hstu", tiny_data, tmp_path, **options)
