"""`nestrec.PipelineCheckpoints`: a model of one's own, saved and taken back."""

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
LRU = StoreConfig(kind="dram", eviction="lru", max_rows=6, admission_count=2)


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
    "ours": lambda model: OptimizerConfig(learning_rate=0.02, ema=0.9, warmup_steps=4),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.02, betas=(0.8, 0.9)),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
}


def made(optimizer="adam", *, schedule="serial", rows=9, dim=DIM, model=None, items="adam"):
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


def trained(pipeline, num_steps):
    """The losses, with a learning rate that the script lowers."""
    for loss in pipeline.run(itertools.islice(batches(pipeline.number), num_steps)):
        if isinstance(pipeline.dense._optimizer, nestrec.pipeline.dense.dense_optimizer.TorchOptimizerAdapter):
            pipeline.dense._optimizer._optimizer.param_groups[0]["lr"] *= 0.5
        yield float(loss)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_that_is_taken_back_goes_on_with_the_same_bits_under_any_exact_schedule(optimizer, tmp_path):
    whole, first, second = made(optimizer), made(optimizer), made(optimizer, schedule="nested")
    expected = list(trained(whole, 6))
    assert list(trained(first, 3)) == expected[:3]
    nestrec.PipelineCheckpoints(first, tmp_path).save({"seen": 3, "rates": (0.1, np.float32(0.5))})
    list(trained(second, 2))  # is forgotten
    assert nestrec.PipelineCheckpoints(second, tmp_path).restore() == {"seen": 3, "rates": [0.1, 0.5]}
    assert (second.number, second.digest()) == (3, first.digest())
    assert list(trained(second, 3)) == expected[3:]
    assert second.digest() == whole.digest()
    for pipeline in (whole, first, second):
        pipeline.close()


def test_buffers_come_back_and_another_course_does_not_find_its_step_saved_already(tmp_path):
    model, other = Model(), Model()
    pipeline, again = made(model=model), made(model=other)
    saved, second = nestrec.PipelineCheckpoints(pipeline, tmp_path), nestrec.PipelineCheckpoints(again, tmp_path)
    list(trained(pipeline, 2))
    saved.save()
    assert second.restore() == {}
    assert torch.equal(other.norm.running_mean, model.norm.running_mean)
    assert other.norm.num_batches_tracked == 4
    again.number = 0  # it sees the same batches again, and is at the same step with other weights
    list(trained(again, 2))
    second.save()
    digest = again.digest()
    saved.restore()
    assert pipeline.digest() == digest
    for each in (pipeline, again):
        each.close()


def test_only_as_many_checkpoints_stay_as_are_wanted_and_none_is_no_error(tmp_path):
    pipeline = made()
    saved = nestrec.PipelineCheckpoints(pipeline, tmp_path / "new", keep=2)
    assert saved.restore() is None
    for _ in range(3):
        list(trained(pipeline, 1))
        path = saved.save()
    assert sorted(folder.name for folder in path.parent.iterdir()) == ["step-00000002", "step-00000003"]
    pipeline.close()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"dim": 8}, "tables.item.dim=8: is 4 in the checkpoint"),
        ({"rows": 8}, "tables.item.rows=8: is 9 in the checkpoint"),
        ({"items": "sgd"}, "tables.item.optimizer=sgd: is 'adam'"),
        ({"model": Model(width=3)}, r"shape of norm.running_mean=\[3\]: is \[4\]"),
        ({"optimizer": "momentum"}, "dense_optimizer=SGD: is 'Adam'"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_and_changes_nothing(other, words, tmp_path):
    pipeline, different = made(), made(**other)
    nestrec.PipelineCheckpoints(pipeline, tmp_path).save()
    before = different.digest()
    with pytest.raises(UserError, match=words):
        nestrec.PipelineCheckpoints(different, tmp_path).restore()
    assert different.digest() == before
    for each in (pipeline, different):
        each.close()


def test_tables_may_have_more_rows_than_when_they_were_saved(tmp_path):
    pipeline, larger = made(), made(rows=12)
    list(trained(pipeline, 2))
    nestrec.PipelineCheckpoints(pipeline, tmp_path).save()
    assert nestrec.PipelineCheckpoints(larger, tmp_path).restore() == {}
    keys = {"item": np.arange(9)}
    assert torch.equal(larger.lookup(keys)["item"], pipeline.lookup(keys)["item"])
    for each in (pipeline, larger):
        each.close()


def test_what_cannot_be_saved_is_told(tmp_path):
    pipeline = made()
    saved = nestrec.PipelineCheckpoints(pipeline, tmp_path)
    for state, words in (
        ({"rng": torch.ones(2)}, "state.rng"),
        ({"milestones": {30: 1}}, "state.milestones"),
        ({"seen": [1, {2}]}, r"state.seen\[1\]"),
    ):
        with pytest.raises(UserError, match=rf"{words} = .*\n.*mappings with text as names"):
            saved.save(state)
    for _ in itertools.islice(pipeline.run(itertools.islice(batches(), 3)), 1):
        with pytest.raises(UserError, match="still in flight"):
            saved.save()
    pipeline.close()
    with pytest.raises(UserError, match="it was closed"):
        saved.save()
    with pytest.raises(UserError, match="is no pipeline of a module"):
        nestrec.PipelineCheckpoints("runs/demo", tmp_path)


def test_weights_that_are_not_finite_are_no_checkpoint(tmp_path):
    pipeline = made()
    saved = nestrec.PipelineCheckpoints(pipeline, tmp_path)
    saved.save()
    pipeline.dense.held["mix.weight"].data.fill_(float("nan"))
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
def test_model_with_other_tensors_is_refused_by_folder(tmp_path, saves_more):
    models = (WithExtra(), Model()) if saves_more else (Model(), WithExtra())
    pipeline, different = (made(model=model) for model in models)
    path = nestrec.PipelineCheckpoints(pipeline, tmp_path).save()
    shapes = ("None", r"\[2\]") if saves_more else (r"\[2\]", "None")
    with pytest.raises(UserError, match=rf"shape of seen={shapes[0]}: is {shapes[1]} in the checkpoint {path}"):
        nestrec.PipelineCheckpoints(different, tmp_path).restore()
    for each in (pipeline, different):
        each.close()


def test_retention_keeps_one_checkpoint_by_default(tmp_path):
    pipeline = made()
    saved = nestrec.PipelineCheckpoints(pipeline, tmp_path)
    for number in range(3):
        pipeline.number = number
        path = saved.save()
    assert [folder.name for folder in path.parent.iterdir()] == ["step-00000002"]
    for keep in (True, "2", 1.5, 0):
        with pytest.raises(UserError, match="keep"):
            nestrec.PipelineCheckpoints(pipeline, tmp_path, keep=keep)
    pipeline.close()
