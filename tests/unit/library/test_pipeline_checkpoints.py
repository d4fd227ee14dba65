"""`nestrec.PipelineCheckpoints`: save and restore a custom model."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import nestrec
from nestrec.base.errors import NonFiniteError, UserError
from nestrec.distributed import Topology
from nestrec.embedding import StoreConfig
from nestrec.pipeline.dense.dense_optimizer import OptimizerConfig

DIM = 4
LRU = StoreConfig(kind="dram", eviction_policy="lru", max_rows=6, admission_threshold=2)


class Model(nn.Module):
    def __init__(self, width: int = DIM) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.mix = nn.Linear(width, 1)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, vectors, batch):
        score = self.mix(self.norm(vectors["item"][:, : self.mix.in_features])) * vectors["user"].sum(1, keepdim=True)
        return nn.functional.softplus(score).sum(), len(score)


OPTIMIZERS = {
    "ours": lambda model: OptimizerConfig(learning_rate=0.02, ema_decay=0.9, warmup_steps=4),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.02, betas=(0.8, 0.9)),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
}


def make_pipeline(optimizer="adam", *, schedule="serial", rows=9, dim=DIM, model=None, items="adam"):
    model = model or Model()
    tables = [
        nestrec.Table("item", rows=rows, dim=dim, optimizer=items, dtype="bfloat16"),
        nestrec.Table("user", rows=None, dim=2, store=LRU),
    ]
    dense = OPTIMIZERS[optimizer](model)
    return nestrec.TrainingPipeline(
        model, tables, dense_optimizer=dense, schedule=schedule, micro_batches=2, topology=Topology.single()
    )


def batches(first=0):
    for step in itertools.count(first):
        draw = np.random.default_rng(step)
        yield {"item": draw.integers(0, 9, 6), "user": draw.integers(0, 9, 6) * 10**12}


def train(pipeline, num_steps):
    """Yield the losses; the script halves the learning rate after each step."""
    for loss in pipeline.run(itertools.islice(batches(pipeline.number), num_steps)):
        if isinstance(pipeline.dense._optimizer, nestrec.pipeline.dense.dense_optimizer.TorchOptimizerAdapter):
            pipeline.dense._optimizer._optimizer.param_groups[0]["lr"] *= 0.5
        yield float(loss)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_pipeline_checkpoint_resume_is_bitwise_identical(optimizer, tmp_path):
    uninterrupted, first, second = (
        make_pipeline(optimizer),
        make_pipeline(optimizer),
        make_pipeline(optimizer, schedule="nested"),
    )
    expected = list(train(uninterrupted, 6))
    assert list(train(first, 3)) == expected[:3]
    nestrec.PipelineCheckpoints(first, tmp_path).save({"seen": 3, "rates": (0.1, np.float32(0.5))})
    list(train(second, 2))  # restoring discards these steps
    assert nestrec.PipelineCheckpoints(second, tmp_path).restore() == {"seen": 3, "rates": [0.1, 0.5]}
    assert (second.number, second.digest()) == (3, first.digest())
    assert list(train(second, 3)) == expected[3:]
    assert second.digest() == uninterrupted.digest()
    for pipeline in (uninterrupted, first, second):
        pipeline.close()


def test_pipeline_checkpoint_restores_buffers(tmp_path):
    model, other = Model(), Model()
    pipeline, again = make_pipeline(model=model), make_pipeline(model=other)
    saved, second = nestrec.PipelineCheckpoints(pipeline, tmp_path), nestrec.PipelineCheckpoints(again, tmp_path)
    list(train(pipeline, 2))
    saved.save()
    assert second.restore() == {}
    assert torch.equal(other.norm.running_mean, model.norm.running_mean)
    assert other.norm.num_batches_tracked == 4
    again.number = 0  # trains on the same batches again, up to the same step with other weights
    list(train(again, 2))
    second.save()
    digest = again.digest()
    saved.restore()
    assert pipeline.digest() == digest
    for each in (pipeline, again):
        each.close()


def test_pipeline_checkpoint_retention(tmp_path):
    pipeline = make_pipeline()
    saved = nestrec.PipelineCheckpoints(pipeline, tmp_path / "new", keep=2)
    assert saved.restore() is None
    for _ in range(3):
        list(train(pipeline, 1))
        path = saved.save()
    assert sorted(folder.name for folder in path.parent.iterdir()) == ["step-00000002", "step-00000003"]
    pipeline.close()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"dim": 8}, "tables.item.dim=8: the value is 4 in the checkpoint"),
        ({"rows": 8}, "tables.item.num_rows=8: the value is 9 in the checkpoint"),
        ({"items": "sgd"}, "tables.item.optimizer=sgd: the value is 'adam'"),
        ({"model": Model(width=3)}, r"shape of norm.running_mean=\[3\]: the value is \[4\]"),
        ({"optimizer": "momentum"}, "dense_optimizer=SGD: the value is 'Adam'"),
    ],
)
def test_pipeline_checkpoint_of_other_pipeline_is_rejected(other, message, tmp_path):
    pipeline, different = make_pipeline(), make_pipeline(**other)
    nestrec.PipelineCheckpoints(pipeline, tmp_path).save()
    before = different.digest()
    with pytest.raises(UserError, match=message):
        nestrec.PipelineCheckpoints(different, tmp_path).restore()
    assert different.digest() == before
    for each in (pipeline, different):
        each.close()


def test_pipeline_checkpoint_tables_may_grow(tmp_path):
    pipeline, larger = make_pipeline(), make_pipeline(rows=12)
    list(train(pipeline, 2))
    nestrec.PipelineCheckpoints(pipeline, tmp_path).save()
    assert nestrec.PipelineCheckpoints(larger, tmp_path).restore() == {}
    keys = {"item": np.arange(9)}
    assert torch.equal(larger.lookup(keys)["item"], pipeline.lookup(keys)["item"])
    for each in (pipeline, larger):
        each.close()


def test_pipeline_checkpoint_rejects_unsupported_state(tmp_path):
    pipeline = make_pipeline()
    saved = nestrec.PipelineCheckpoints(pipeline, tmp_path)
    for state, message in (
        ({"rng": torch.ones(2)}, "state.rng"),
        ({"milestones": {30: 1}}, "state.milestones"),
        ({"seen": [1, {2}]}, r"state.seen\[1\]"),
    ):
        with pytest.raises(UserError, match=rf"{message}=.*mappings with string keys"):
            saved.save(state)
    for _ in itertools.islice(pipeline.run(itertools.islice(batches(), 3)), 1):
        with pytest.raises(UserError, match="still in flight"):
            saved.save()
    pipeline.close()
    with pytest.raises(UserError, match="it was closed"):
        saved.save()
    with pytest.raises(UserError, match=r"must be a nestrec\.TrainingPipeline"):
        nestrec.PipelineCheckpoints("runs/demo", tmp_path)


def test_pipeline_checkpoint_rejects_nonfinite_weights(tmp_path):
    pipeline = make_pipeline()
    saved = nestrec.PipelineCheckpoints(pipeline, tmp_path)
    saved.save()
    pipeline.dense.local_weights["mix.weight"].data.fill_(float("nan"))
    pipeline.number = 1
    with pytest.raises(NonFiniteError, match="the last checkpoint is intact"):
        saved.save()
    assert saved.restore() == {}
    assert pipeline.number == 0
    pipeline.close()


class WithExtra(Model):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))


@pytest.mark.parametrize("saves_more", [True, False])
def test_pipeline_checkpoint_rejects_other_model_tensors(tmp_path, saves_more):
    models = (WithExtra(), Model()) if saves_more else (Model(), WithExtra())
    pipeline, different = (make_pipeline(model=model) for model in models)
    path = nestrec.PipelineCheckpoints(pipeline, tmp_path).save()
    shapes = ("None", r"\[2\]") if saves_more else (r"\[2\]", "None")
    with pytest.raises(
        UserError, match=rf"shape of seen={shapes[0]}: the value is {shapes[1]} in the checkpoint {path}"
    ):
        nestrec.PipelineCheckpoints(different, tmp_path).restore()
    for each in (pipeline, different):
        each.close()


def test_pipeline_checkpoint_retains_one_by_default(tmp_path):
    pipeline = make_pipeline()
    saved = nestrec.PipelineCheckpoints(pipeline, tmp_path)
    for number in range(3):
        pipeline.number = number
        path = saved.save()
    assert [folder.name for folder in path.parent.iterdir()] == ["step-00000002"]
    for keep in (True, "2", 1.5, 0):
        with pytest.raises(UserError, match="keep"):
            nestrec.PipelineCheckpoints(pipeline, tmp_path, keep=keep)
    pipeline.close()
