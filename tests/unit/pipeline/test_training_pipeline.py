"""`nestrec.TrainingPipeline` with a custom module, mappings as batches and any schedule."""

import itertools
from importlib.metadata import EntryPoint
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import nestrec
from nestrec.base.config_values import from_plain
from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.embedding import StoreConfig
from nestrec.pipeline import SCHEDULES, PipelineConfig, ScheduleSpec
from nestrec.pipeline.dense.dense_optimizer import OptimizerConfig
from nestrec.pipeline.schedules.serial import SerialSchedule

DIM = 4


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.mix = nn.Linear(DIM, DIM)

    def forward(self, vectors, batch):
        history = vectors["history"]
        mean = torch.stack([self.mix(row).tanh().sum(0) for row in history.rows()])
        score = (mean * vectors["item"]).sum(1) + batch["shift"]
        return nn.functional.softplus(-score * batch["sign"]).sum(), len(score)


def batches(num_steps: int = 6, num_samples: int = 7):
    for step in range(num_steps):
        draw = np.random.default_rng(step)
        rows = [torch.from_numpy(draw.integers(0, 30, n)) for n in draw.integers(1, 5, num_samples)]
        sign = torch.from_numpy(draw.choice([-1.0, 1.0], num_samples).astype(np.float32))
        yield {
            "history": nestrec.Jagged.from_rows(rows),
            "item": draw.integers(0, 30, num_samples),
            "sign": sign,
            "shift": 0.5,
        }


def make_pipeline(schedule: str | PipelineConfig = "serial", **options) -> nestrec.TrainingPipeline:
    dtype = options.pop("dtype", "float32")
    table = nestrec.Table("items", rows=30, dim=DIM, optimizer="adam", features=("history", "item"), dtype=dtype)
    options = {"micro_batches": 3, "topology": Topology.single(), "device": "cpu", **options}
    return nestrec.TrainingPipeline(options.pop("model", None) or Towers(), [table], schedule=schedule, **options)


def train(schedule: str | PipelineConfig, **options) -> tuple[list[float], str]:
    pipeline = make_pipeline(schedule, **options)
    losses = [float(loss) for loss in pipeline.run(batches())]
    digest = pipeline.digest()
    pipeline.close()
    return losses, digest


def test_pipeline_exact_schedules_are_bitwise_identical():
    expected = train("serial")
    assert len(set(expected[0])) == 6
    for name in SCHEDULES:
        if SCHEDULES.find(name).is_exact:
            assert train(name) == expected, name


def test_pipeline_half_precision_rows_use_float32_gradients():
    class GradientDtypes(Towers):
        def forward(self, vectors, batch):
            assert vectors["item"].dtype == vectors["history"].values.dtype == torch.float32
            vectors["item"].register_hook(lambda grad: kinds.append(grad.dtype))
            return super().forward(vectors, batch)

    kinds: list[torch.dtype] = []
    serial, nested = (train(name, dtype="bfloat16", model=GradientDtypes()) for name in ("serial", "nested"))
    assert nested == serial
    assert set(kinds) == {torch.float32}
    assert serial[0] == pytest.approx(train("serial")[0], rel=0.05), "losses must be close to those of float32 rows"
    assert serial != train("serial")


def test_pipeline_clustering_and_window_cache_options():
    serial, nested = (
        train(PipelineConfig(schedule=name, clustering="greedy", window_cache=True)) for name in ("serial", "nested")
    )
    assert nested == serial
    assert serial != train("serial"), "other micro-batches must round differently"
    assert serial[0] == pytest.approx(train("serial")[0], rel=1e-4)


def test_pipeline_step_equals_run():
    pipeline = make_pipeline("nested")
    losses = [float(pipeline.step(batch)) for batch in batches()]
    assert (losses, pipeline.digest()) == train("serial")
    assert pipeline.lookup({"item": np.array([3, 4])})["item"].shape == (2, DIM)
    pipeline.close()


def test_pipeline_step_equals_plain_torch():
    batch = next(batches(1))
    model = Towers()
    pipeline = make_pipeline(
        model=model, dense_optimizer=torch.optim.SGD(model.parameters(), 0.5), table_learning_rate=0.0
    )
    vectors = pipeline.lookup({"history": batch["history"].values, "item": batch["item"]})
    reference = Towers()
    history = nestrec.Jagged(vectors["history"], batch["history"].offsets)
    loss, weight = reference({"history": history, "item": vectors["item"]}, batch)
    (loss / weight).backward()
    assert float(pipeline.step(batch)) == pytest.approx(loss.item() / weight, rel=1e-6)
    torch.testing.assert_close(model.mix.weight, reference.mix.weight - 0.5 * reference.mix.weight.grad)
    pipeline.close()


def test_pipeline_accepts_batches_smaller_than_micro_batches():
    pipeline = make_pipeline("nested", micro_batches=4)
    assert all(np.isfinite(float(loss)) for loss in pipeline.run([*batches(2), *batches(1, 2), *batches(2)]))
    pipeline.close()


def test_pipeline_run_left_early_cannot_continue():
    pipeline = make_pipeline("nested")
    for _ in itertools.islice(pipeline.run(batches()), 2):
        pass
    for use in (pipeline.digest, lambda: pipeline.step(next(batches(1)))):
        with pytest.raises(UserError, match=r"still in flight.*pass fewer batches"):
            use()
    pipeline.close()


def test_pipeline_tables_are_complete_at_fences():
    pipeline = make_pipeline("nested")
    digests = [
        pipeline.digest() for number, _ in enumerate(pipeline.run(batches(), fence_every=2), 1) if not number % 2
    ]
    assert len(set(digests)) == 3
    assert digests[-1] == train("serial")[1]
    pipeline.close()


class Tokens(Towers):
    def forward(self, vectors, batch):
        return super().forward(vectors, batch)[0], vectors["history"].num_values


def test_pipeline_declared_weight_must_match_model():
    with pytest.raises(UserError, match=r"returned 3\. Pass weight=\.\.\."):
        train("serial", model=Tokens())
    losses, _ = train("serial", model=Tokens(), weight=lambda batch: batch["history"].num_values)
    first = next(batches(1))
    assert losses[0] == pytest.approx(train("serial")[0][0] * 7 / first["history"].num_values, rel=1e-6)


def test_pipeline_rejects_loss_without_weight():
    model = Towers()
    model.forward = lambda vectors, batch: vectors["item"].sum()
    with pytest.raises(UserError, match="sum of its losses and their weight"):
        train("serial", model=model)
    pipeline = make_pipeline()
    with pytest.raises(UserError, match="has 3 samples, but other fields have 7"):
        pipeline.step({**next(batches(1)), "sign": torch.ones(3)})
    pipeline.close()


def test_pipeline_coupled_samples_reject_micro_batches():
    with pytest.raises(UserError, match="depends on all samples of a batch"):
        train("serial", couples_samples="batch")


def test_pipeline_warmup_and_learning_rates():
    options = OptimizerConfig(learning_rate=0.5, table_learning_rate=0.25, warmup_steps=4)
    assert [(options.rates(n).dense, options.rates(n).tables) for n in (1, 4, 9)] == [
        (0.125, 0.0625),
        (0.5, 0.25),
        (0.5, 0.25),
    ]


def test_pipeline_unknown_schedule_suggests_name():
    with pytest.raises(UserError, match=r"[Dd]id you mean 'nested'"):
        make_pipeline("nestet")


class RecordingSchedule(SerialSchedule):
    """A schedule from another package."""

    steps: ClassVar[list[int]] = []

    def advance(self, step, feed):
        self.steps.append(step.number)
        return super().advance(step, feed)


RECORDING_SCHEDULE = ScheduleSpec(name="noting", build=RecordingSchedule, is_exact=True, splits=False)


def test_pipeline_finds_plugin_schedule(monkeypatch):
    point = EntryPoint("noting", f"{__name__}:RECORDING_SCHEDULE", SCHEDULES.group)
    monkeypatch.setitem(SCHEDULES._external, "noting", point)
    monkeypatch.setitem(SCHEDULES._loaded, "noting", RECORDING_SCHEDULE)
    options = from_plain(PipelineConfig, {"schedule": "noting"})
    assert train(options) == train("serial")
    assert RecordingSchedule.steps == [1, 2, 3, 4, 5, 6]
    with pytest.raises(UserError, match="the schedule noting does not use this option"):
        PipelineConfig(schedule="noting", stale_steps=2)


def test_pipeline_checks_schedule_requirements_at_start():
    store = StoreConfig(eviction_policy="ttl", ttl_steps=0)
    table = nestrec.Table("items", rows=None, dim=DIM, store=store, features=("history", "item"))
    with pytest.raises(UserError, match="the schedule nested requires that rows outlive the next step"):
        nestrec.TrainingPipeline(Towers(), [table], schedule="nested", topology=Topology.single(), device="cpu")


def test_pipeline_evaluate_between_steps_uses_current_rows():
    pooled_options = {"pooled": {"history": "mean"}, "model": PooledModel()}
    for options in ({"model": Towers()}, pooled_options):
        pipeline = make_pipeline("nested", **options)
        batch = next(batches(1))
        with torch.no_grad():
            loss, weight = options["model"](*pipeline.inputs(batch))
        assert float(loss) / weight == pytest.approx(float(pipeline.step(batch)), rel=1e-6)
        digest = pipeline.digest()
        pipeline.inputs({"item": batch["item"]})
        assert pipeline.digest() == digest
        pipeline.close()


def test_pipeline_evaluate_does_not_change_dynamic_tables():
    def result(is_measured):
        table = nestrec.Table("items", rows=None, dim=DIM, features=("history", "item"))
        pipeline = nestrec.TrainingPipeline(Towers(), [table], schedule="nested", topology=Topology.single())
        for _ in pipeline.run(batches(), fence_every=2):
            if is_measured and not pipeline.number % 2:
                pipeline.inputs(next(batches(1)) | {"item": np.arange(1000, 1007)})
        digest = pipeline.digest()
        pipeline.close()
        return digest

    assert result(True) == result(False)


def test_pipeline_rejects_weights_frozen_later():
    pipeline = make_pipeline(model=Towers())
    batch = next(batches(1))
    pipeline.step(batch)
    for weight in pipeline.dense.local_weights.values():
        weight.requires_grad_(False)
    with pytest.raises(UserError, match=r"mix\.bias: requires_grad has changed"):
        pipeline.step(batch)
    pipeline.close()


class PooledModel(nn.Module):
    """A score of the sum of the rows of a feature, pooled by the pipeline or summed here."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.mix = nn.Linear(DIM, 1)

    def forward(self, vectors, batch):
        pooled_batches = vectors["history"]
        if isinstance(pooled_batches, nestrec.Jagged):
            pooled_batches = torch.stack([row.sum(0) for row in pooled_batches.rows()])
        score = self.mix(pooled_batches.tanh())[:, 0] + (pooled_batches * vectors["item"]).sum(1)
        return nn.functional.softplus(-score * batch["sign"]).sum(), len(score)


def pooled_batches(num_steps: int = 4):
    """Yield batches in which every third history is empty."""
    for batch in batches(num_steps):
        rows = [row[: 0 if n % 3 == 0 else None] for n, row in enumerate(batch["history"].rows())]
        yield batch | {"history": nestrec.Jagged.from_rows(rows)}


def test_pipeline_pooled_feature_is_sum_of_rows():
    def result(schedule, pooled):
        pipeline = make_pipeline(schedule, model=PooledModel(), pooled=pooled)
        losses = [float(loss) for loss in pipeline.run(pooled_batches())]
        vectors = pipeline.lookup({"history": np.arange(30), "item": np.arange(30)})["item"]
        pipeline.close()
        return losses, vectors

    (pooled, rows), (summed, expected), (nested, nested_rows) = (
        result("serial", ("history",)),
        result("serial", ()),
        result("nested", ("history",)),
    )
    assert pooled == pytest.approx(summed, rel=1e-6)
    torch.testing.assert_close(rows, expected, rtol=1e-6, atol=1e-6)
    assert nested == pooled
    assert torch.equal(nested_rows, rows)


def test_pipeline_pooled_feature_with_fixed_length():
    class Sum(nn.Module):
        def forward(self, vectors, batch):
            assert vectors["pair"].shape == (len(batch["pair"]), DIM)
            return vectors["pair"].sum(), len(batch["pair"])

    table = nestrec.Table("pair", rows=9, dim=DIM)
    pipeline = nestrec.TrainingPipeline(
        Sum(), [table], pooled=("pair",), micro_batches=2, topology=Topology.single(), device="cpu"
    )
    keys = np.array([[1, 2], [3, 3], [0, 8]])
    expected = pipeline.lookup({"pair": keys})["pair"].double().sum() / len(keys)
    torch.testing.assert_close(pipeline.step({"pair": keys}), expected)
    pipeline.close()


def test_pipeline_rejects_pooled_feature_without_table():
    with pytest.raises(UserError, match="pooled=tags: unknown feature"):
        make_pipeline(pooled=("tags",))


def test_pipeline_weighted_pooling_requires_weights():
    with pytest.raises(UserError, match=r"pooled\.history=max: unknown pooling method"):
        make_pipeline(model=PooledModel(), pooled={"history": "max"})
    pipeline = make_pipeline(model=PooledModel(), pooled={"history": "weighted"})
    with pytest.raises(UserError, match="history/weight"):
        list(pipeline.run(pooled_batches()))
    pipeline.close()


def test_pipeline_closed_or_failed_rejects_use():
    closed, failed = make_pipeline(), make_pipeline("nested")
    closed.step(next(batches(1)))
    closed.close()

    def failing_batches():
        yield from batches(2)
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        list(failed.run(failing_batches()))
    for pipeline, why in ((closed, "it was closed"), (failed, "disk gone")):
        for use in (pipeline.digest, lambda p=pipeline: p.step(next(batches(1)))):
            with pytest.raises(UserError, match=rf"training has ended: .*{why}.*Build a new"):
                use()
    failed.close()


def test_pipeline_recovers_from_invalid_first_batch():
    pipeline = make_pipeline()
    batch = next(batches(1))
    for wrong in (
        [batch],
        {**batch, "item": batch["item"] + 0.5},
        {**batch, "sign": torch.ones(3)},
        {**batch, "item/offsets": batch["item"]},
    ):
        with pytest.raises(UserError, match="batch"):
            pipeline.step(wrong)
    assert float(pipeline.step(batch)) == train("serial")[0][0]
    with pytest.raises(UserError, match="must be an iterable of batches"):
        list(pipeline.run(batch))
    with pytest.raises(UserError, match=r"[Dd]id you mean 'item'"):
        pipeline.lookup({"itm": np.array([1])})
    with pytest.raises(UserError, match="keys must be integers"):
        pipeline.lookup({"item": np.array([1.5])})
    with pytest.raises(UserError, match="fence_every=0:"):
        list(pipeline.run(batches(2), fence_every=0))
    pipeline.close()


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (lambda loss: (loss.expand(3), 3), r"torch.float32 of \(3,\).*must be a scalar"),
        (lambda loss: (loss.detach(), 3), "does not depend on weights"),
        (lambda loss: (loss.item(), 3), "must be a tensor"),
        (lambda loss: (loss, float("nan")), "returned the weight nan"),
        (lambda loss: (loss, None), "must be a number"),
    ],
)
def test_pipeline_checks_model_output(transform, words):
    model = Towers()
    model.forward = lambda vectors, batch: transform(Towers.forward(model, vectors, batch)[0])
    with pytest.raises(UserError, match=words):
        train("serial", model=model)


class WeightedTowers(Towers):
    def forward(self, vectors, batch):
        return super().forward(vectors, batch)[0] * batch["shift"], len(batch["sign"]) * batch["shift"]


def test_pipeline_batch_with_zero_weight_changes_nothing():
    pipeline = make_pipeline(model=WeightedTowers(), weight=lambda batch: len(batch["sign"]) * batch["shift"])
    before = pipeline.digest()
    assert float(pipeline.step({**next(batches(1)), "shift": 0.0})) == 0
    assert np.isfinite(float(pipeline.step({**next(batches(1)), "shift": 1.0})))
    assert pipeline.digest() != before
    pipeline.close()
    with pytest.raises(UserError, match="must be finite and not negative"):
        train("serial", weight=lambda batch: -1.0)
