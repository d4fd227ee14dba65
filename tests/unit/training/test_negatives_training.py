"""Options of negatives in a run: loss variants agree, automatic choices are stored, errors are raised at the start."""

import json
from pathlib import Path

import pytest

from nestrec.base.errors import UserError
from nestrec.checkpoint import CheckpointManager
from nestrec.distributed import Topology
from nestrec.tasks.loss_options import LossShape, choose_variant
from nestrec.training.state import run_digest
from nestrec.training.trainer import Trainer
from support.tiny_runs import config_of, make_datasets

RUN = {"training.max_steps": 6, "training.epochs": 9, "training.weight_dtype": "float64"}


@pytest.fixture(scope="module")
def tiny_data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return folder


def trainer_of(data: Path, folder: Path, more: dict[str, object], family: str = "hstu") -> Trainer:
    overrides = {**RUN, **{name.replace("__", "."): value for name, value in more.items()}}
    return Trainer(config_of(family, data, overrides), folder, Topology.single())


def weights_after(data: Path, folder: Path, family: str = "hstu", **more: object):
    trainer = trainer_of(data, folder, more, family)
    trainer.train()
    return next(iter(trainer.session.engine.snapshot("items")))["weight"]


@pytest.mark.parametrize("sampler", ["uniform", "popularity", "in_batch"])
def test_negatives_every_loss_variant_trains_the_same_model(tiny_data, tmp_path, sampler):
    more = {"task__negatives__sampler": sampler, "task__negatives__logit_sharing": 2}
    plain = weights_after(tiny_data, tmp_path / "plain", **more)
    for variant in ("segments", "fused", "offload"):
        other = weights_after(tiny_data, tmp_path / variant, **more, task__negatives__loss_variant=variant)
        assert (other - plain).abs().max() < 1e-10


def test_full_softmax_tiled_trains_the_same_model(tiny_data, tmp_path):
    plain, tiled = (
        weights_after(tiny_data, tmp_path / variant, "sasrec", task__negatives__loss_variant=variant)
        for variant in ("plain", "fused")
    )
    assert (tiled - plain).abs().max() < 1e-10


def test_logit_sharing_changes_loss_without_more_lookups(tiny_data, tmp_path):
    rows = {}
    for sharing in (1, 3):
        trainer = trainer_of(tiny_data, tmp_path / str(sharing), {"task.negatives.logit_sharing": sharing})
        trainer.train()
        rows[sharing] = trainer.session.engine.statistics.vectors.rows
    assert rows[1] == rows[3]
    assert run_digest(tmp_path / "1") != run_digest(tmp_path / "3")


def test_loss_variant_auto_is_logged_saved_and_resumed(tiny_data, tmp_path):
    more = {"task.negatives.loss_variant": "auto", "training.max_steps": 3}
    first = trainer_of(tiny_data, tmp_path, more)
    first.train()
    variant = first.session.task.variant
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert any(line.get("text", "").startswith(f"loss variant: {variant}") for line in lines)
    restored = CheckpointManager(tmp_path / "checkpoints").restore_latest()
    assert restored is not None
    assert restored.state["train"]["loss_variant"] == variant
    resumed = trainer_of(tiny_data, tmp_path, {**more, "training.max_steps": 5})
    resumed.state = resumed.checkpointer.restore_last_if_any()
    assert resumed._choose_loss_variant("segments") == "segments"
    assert resumed.session.task.variant == "segments"


def test_loss_variant_auto_considers_only_what_fits():
    shape = LossShape(
        tokens=64, negatives=64, sharing=1, rows=500, dim=64, segment_tokens=8, kind="bce", dtype="float32"
    )
    _, everything = choose_variant(shape, Topology.single(), None)
    assert set(everything) == {"plain", "segments", "fused", "offload"}
    _, small = choose_variant(shape, Topology.single(), 1e-3)
    assert set(small) == {"segments", "fused"}, "without a GPU, device memory is host memory"
    assert choose_variant(shape, Topology.single(), 0.0)[0] == "fused"


def test_loss_variant_auto_measures_offload_on_few_segments():
    shape = LossShape(
        tokens=6400, negatives=64, sharing=1, rows=500, dim=64, segment_tokens=8, kind="bce", dtype="float32"
    )
    measured_tokens = {}

    def measure(variant, shape, device):
        measured_tokens[variant] = shape.tokens
        return 0.001 * shape.tokens * (1 if variant == "offload" else 2)

    chosen, times = choose_variant(shape, Topology.single(), None, measure)
    assert chosen == "offload"
    assert times["offload"] == pytest.approx(6.4)
    assert measured_tokens == {"plain": 6400, "segments": 6400, "fused": 6400, "offload": 32}


@pytest.mark.parametrize(
    ("overrides", "option", "message"),
    [
        ({"task.negatives.logit_sharing": 2000}, "task.negatives.logit_sharing", "the largest has 9[0-9]"),
        (
            {"task.negatives.sampler": "in_batch", "task.negatives.num_negatives": 500},
            "task.negatives.num_negatives",
            "other tokens",
        ),
        ({"task.negatives.num_negatives": 60}, "task.negatives.num_negatives", "more items than negatives"),
        (
            {"task.negatives.sampler": "popularity", "task.negatives.num_negatives": 60},
            "task.negatives.num_negatives",
            "items with events",
        ),
        ({"task.negatives.logit_sharing": 0}, "task.negatives.logit_sharing", "1 or more"),
    ],
)
def test_negatives_beyond_batch_or_catalog_are_rejected(tiny_data, tmp_path, overrides, option, message):
    with pytest.raises(UserError, match=message) as raised:
        trainer_of(tiny_data, tmp_path, overrides)
    assert raised.value.option == option
    assert raised.value.remedy


def test_negatives_in_half_precision_read_fewer_bytes(tiny_data, tmp_path):
    num_bytes, weights = {}, {}
    for lookup in ("full", "bfloat16"):
        more = {
            "task.negatives.lookup_dtype": lookup,
            "training.weight_dtype": "float32",
            "pipeline.schedule": "nested",
        }
        trainer = trainer_of(tiny_data, tmp_path / lookup, more)
        trainer.train()
        num_bytes[lookup] = trainer.session.engine.statistics.vector_bytes
        weights[lookup] = next(iter(trainer.session.engine.snapshot("items")))["weight"]
    assert num_bytes["bfloat16"] < num_bytes["full"]
    assert 0 < (weights["full"] - weights["bfloat16"]).abs().max() < 0.01
