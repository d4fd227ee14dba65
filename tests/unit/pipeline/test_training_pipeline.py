"""`nestrec.TrainingPipeline`: a module of the user's own, batches that are plain mappings, any schedule."""

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


def made(schedule: str | PipelineConfig = "serial", **options) -> nestrec.TrainingPipeline:
    dtype = options.pop("dtype", "float32")
    table = nestrec.Table("items", rows=30, dim=DIM, optimizer="adam", features=("history", "item"), dtype=dtype)
    options = {"micro_batches": 3, "topology": Topology.single(), "device": "cpu", **options}
    return nestrec.TrainingPipeline(options.pop("model", None) or Towers(), [table], schedule=schedule, **options)


def trained(schedule: str | PipelineConfig, **options) -> tuple[list[float], str]:
    pipeline = made(schedule, **options)
    losses = [float(loss) for loss in pipeline.run(batches())]
    digest = pipeline.digest()
    pipeline.close()
    return losses, digest


def test_exact_schedules_give_the_bits_of_serial():
    expected = trained("serial")
    assert len(set(expected[0])) == 6
    for name in SCHEDULES:
        if SCHEDULES.find(name).is_exact:
            assert trained(name) == expected, name


def test_rows_of_16_bits_train_a_module_of_ones_own_with_vectors_and_gradients_in_float32():
    class Watching(Towers):
        def forward(self, vectors, batch):
            assert vectors["item"].dtype == vectors["history"].values.dtype == torch.float32
            vectors["item"].register_hook(lambda grad: kinds.append(grad.dtype))
            return super().forward(vectors, batch)

    kinds: list[torch.dtype] = []
    serial, nested = (trained(name, dtype="bfloat16", model=Watching()) for name in ("serial", "nested"))
    assert nested == serial
    assert set(kinds) == {torch.float32}
    assert serial[0] == pytest.approx(trained("serial")[0], rel=0.05), "and nearly as float32 rows do"
    assert serial != trained("serial")


def test_clustering_and_the_window_cache_are_options_of_the_schedule():
    serial, nested = (
        trained(PipelineConfig(schedule=name, clustering="greedy", window_cache=True)) for name in ("serial", "nested")
    )
    assert nested == serial
    assert serial != trained("serial"), "other micro-batches round otherwise"
    assert serial[0] == pytest.approx(trained("serial")[0], rel=1e-4)


def test_step_by_step_is_the_same_training():
    pipeline = made("nested")
    losses = [float(pipeline.step(batch)) for batch in batches()]
    assert (losses, pipeline.digest()) == trained("serial")
    assert pipeline.lookup({"item": np.array([3, 4])})["item"].shape == (2, DIM)
    pipeline.close()


def test_one_step_is_that_of_plain_torch():
    batch = next(batches(1))
    model = Towers()
    pipeline = made(model=model, dense_optimizer=torch.optim.SGD(model.parameters(), 0.5), table_learning_rate=0.0)
    vectors = pipeline.lookup({"history": batch["history"].values, "item": batch["item"]})
    twin = Towers()
    history = nestrec.Jagged(vectors["history"], batch["history"].offsets)
    loss, weight = twin({"history": history, "item": vectors["item"]}, batch)
    (loss / weight).backward()
    assert float(pipeline.step(batch)) == pytest.approx(loss.item() / weight, rel=1e-6)
    torch.testing.assert_close(model.mix.weight, twin.mix.weight - 0.5 * twin.mix.weight.grad)
    pipeline.close()


def test_batches_may_be_smaller_than_the_number_of_micro_batches():
    pipeline = made("nested", micro_batches=4)
    assert all(np.isfinite(float(loss)) for loss in pipeline.run([*batches(2), *batches(1, 2), *batches(2)]))
    pipeline.close()


def test_a_run_that_was_left_early_is_not_gone_on_with():
    pipeline = made("nested")
    for _ in itertools.islice(pipeline.run(batches()), 2):
        pass
    for use in (pipeline.digest, lambda: pipeline.step(next(batches(1)))):
        with pytest.raises(UserError, match=r"still in flight.*\n.*shorten its batches"):
            use()
    pipeline.close()


def test_tables_are_whole_at_the_fences_inside_a_run():
    pipeline = made("nested")
    digests = [
        pipeline.digest() for number, _ in enumerate(pipeline.run(batches(), fence_every=2), 1) if not number % 2
    ]
    assert len(set(digests)) == 3
    assert digests[-1] == trained("serial")[1]
    pipeline.close()


class Tokens(Towers):
    def forward(self, vectors, batch):
        return super().forward(vectors, batch)[0], vectors["history"].num_values


def test_the_weight_is_known_before_and_must_be_the_models():
    with pytest.raises(UserError, match=r"announced with 3.*\n.*weight=\.\.\."):
        trained("serial", model=Tokens())
    losses, _ = trained("serial", model=Tokens(), weight=lambda batch: batch["history"].num_values)
    first = next(batches(1))
    assert losses[0] == pytest.approx(trained("serial")[0][0] * 7 / first["history"].num_values, rel=1e-6)


def test_a_loss_without_a_weight_and_fields_that_disagree_are_refused():
    model = Towers()
    model.forward = lambda vectors, batch: vectors["item"].sum()
    with pytest.raises(UserError, match="sum of its losses and their weight"):
        trained("serial", model=model)
    pipeline = made()
    with pytest.raises(UserError, match="holds 3 samples where others hold 7"):
        pipeline.step({**next(batches(1)), "sign": torch.ones(3)})
    pipeline.close()


def test_samples_coupled_over_the_batch_are_not_cut():
    with pytest.raises(UserError, match="couples the samples of the whole batch"):
        trained("serial", couples_samples="batch")


def test_warm_up_and_rates_come_with_the_options_of_our_optimiser():
    options = OptimizerConfig(learning_rate=0.5, table_learning_rate=0.25, warmup_steps=4)
    assert [(options.rates(n).dense, options.rates(n).tables) for n in (1, 4, 9)] == [
        (0.125, 0.0625),
        (0.5, 0.25),
        (0.5, 0.25),
    ]


def test_an_unknown_schedule_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match="did you mean 'nested'"):
        made("nestet")


class Noting(SerialSchedule):
    """A schedule of another package."""

    steps: ClassVar[list[int]] = []

    def advance(self, step, feed):
        self.steps.append(step.number)
        return super().advance(step, feed)


NOTING = ScheduleSpec(name="noting", build=Noting, is_exact=True, splits=False)


def test_a_schedule_of_another_package_is_found_by_name(monkeypatch):
    point = EntryPoint("noting", f"{__name__}:NOTING", SCHEDULES.group)
    monkeypatch.setitem(SCHEDULES._foreign, "noting", point)
    monkeypatch.setitem(SCHEDULES._loaded, "noting", NOTING)
    options = from_plain(PipelineConfig, {"schedule": "noting"})
    assert trained(options) == trained("serial")
    assert Noting.steps == [1, 2, 3, 4, 5, 6]
    with pytest.raises(UserError, match="means nothing to the schedule noting"):
        PipelineConfig(schedule="noting", stale_steps=2)


def test_what_a_schedule_needs_of_the_tables_is_said_before_training():
    store = StoreConfig(eviction="ttl", ttl_steps=0)
    table = nestrec.Table("items", rows=None, dim=DIM, store=store, features=("history", "item"))
    with pytest.raises(UserError, match="rows must outlive the next step under the schedule nested"):
        nestrec.TrainingPipeline(Towers(), [table], schedule="nested", topology=Topology.single(), device="cpu")


def test_a_model_is_measured_between_steps_with_what_a_step_would_give_it():
    bagged = {"pooled": {"history": "mean"}, "model": Bags()}
    for options in ({"model": Towers()}, bagged):
        pipeline = made("nested", **options)
        batch = next(batches(1))
        with torch.no_grad():
            loss, weight = options["model"](*pipeline.inputs(batch))
        assert float(loss) / weight == pytest.approx(float(pipeline.step(batch)), rel=1e-6)
        digest = pipeline.digest()
        pipeline.inputs({"item": batch["item"]})
        assert pipeline.digest() == digest
        pipeline.close()


def test_what_is_measured_between_steps_changes_no_bit_of_dynamic_tables():
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


def test_weights_that_are_frozen_or_thawed_later_are_told_and_not_trained_by_each_rank_alone():
    pipeline = made(model=Towers())
    batch = next(batches(1))
    pipeline.step(batch)
    for weight in pipeline.dense.held.values():
        weight.requires_grad_(False)
    with pytest.raises(UserError, match=r"'mix\.bias': requires_grad has changed"):
        pipeline.step(batch)
    pipeline.close()


class Bags(nn.Module):
    """A score of the sum of a bag's rows: handed over as one vector, or summed here."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.mix = nn.Linear(DIM, 1)

    def forward(self, vectors, batch):
        bags = vectors["history"]
        if isinstance(bags, nestrec.Jagged):
            bags = torch.stack([row.sum(0) for row in bags.rows()])
        score = self.mix(bags.tanh())[:, 0] + (bags * vectors["item"]).sum(1)
        return nn.functional.softplus(-score * batch["sign"]).sum(), len(score)


def bags(num_steps: int = 4):
    """One bag in three is empty."""
    for batch in batches(num_steps):
        rows = [row[: 0 if n % 3 == 0 else None] for n, row in enumerate(batch["history"].rows())]
        yield batch | {"history": nestrec.Jagged.from_rows(rows)}


def test_a_pooled_feature_is_the_sum_of_its_rows():
    def result(schedule, pooled):
        pipeline = made(schedule, model=Bags(), pooled=pooled)
        losses = [float(loss) for loss in pipeline.run(bags())]
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


def test_a_pooled_feature_with_as_many_keys_for_each_sample_needs_no_lengths():
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


def test_a_pooled_feature_that_no_table_has_is_refused():
    with pytest.raises(UserError, match="pooled=tags: is no feature of a table"):
        made(pooled=("tags",))


def test_bags_are_pooled_as_named_and_weighted_ones_need_their_weights():
    with pytest.raises(UserError, match=r"pooled\.history=max: is no way to pool"):
        made(model=Bags(), pooled={"history": "max"})
    pipeline = made(model=Bags(), pooled={"history": "weighted"})
    with pytest.raises(UserError, match="history/weight"):
        list(pipeline.run(bags()))
    pipeline.close()


def test_a_pipeline_that_was_closed_or_has_failed_says_so_instead_of_reading_memory_given_back():
    closed, failed = made(), made("nested")
    closed.step(next(batches(1)))
    closed.close()

    def breaking():
        yield from batches(2)
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        list(failed.run(breaking()))
    for pipeline, why in ((closed, "it was closed"), (failed, "disk gone")):
        for use in (pipeline.digest, lambda p=pipeline: p.step(next(batches(1)))):
            with pytest.raises(UserError, match=rf"trains no more: .*{why}.*.*build a new"):
                use()
    failed.close()


def test_a_mistake_in_a_batch_before_anything_is_in_flight_can_be_mended():
    pipeline = made()
    batch = next(batches(1))
    for wrong in (
        [batch],
        {**batch, "item": batch["item"] + 0.5},
        {**batch, "sign": torch.ones(3)},
        {**batch, "item/offsets": batch["item"]},
    ):
        with pytest.raises(UserError, match="batch"):
            pipeline.step(wrong)
    assert float(pipeline.step(batch)) == trained("serial")[0][0]
    with pytest.raises(UserError, match="give an iterable of batches"):
        list(pipeline.run(batch))
    with pytest.raises(UserError, match="did you mean 'item'"):
        pipeline.lookup({"itm": np.array([1])})
    with pytest.raises(UserError, match="keys are whole numbers"):
        pipeline.lookup({"item": np.array([1.5])})
    with pytest.raises(UserError, match="fence_every = 0"):
        list(pipeline.run(batches(2), fence_every=0))
    pipeline.close()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda loss: (loss.expand(3), 3), r"torch.float32 of \(3,\).*must be one number"),
        (lambda loss: (loss.detach(), 3), "depends on no weight"),
        (lambda loss: (loss.item(), 3), "its loss is no tensor"),
        (lambda loss: (loss, float("nan")), "the model says nan"),
        (lambda loss: (loss, None), "is no number"),
    ],
)
def test_what_a_model_returns_is_checked(answer, words):
    model = Towers()
    model.forward = lambda vectors, batch: answer(Towers.forward(model, vectors, batch)[0])
    with pytest.raises(UserError, match=words):
        trained("serial", model=model)


class Masked(Towers):
    def forward(self, vectors, batch):
        return super().forward(vectors, batch)[0] * batch["shift"], len(batch["sign"]) * batch["shift"]


def test_a_batch_in_which_no_sample_counts_teaches_nothing():
    pipeline = made(model=Masked(), weight=lambda batch: len(batch["sign"]) * batch["shift"])
    before = pipeline.digest()
    assert float(pipeline.step({**next(batches(1)), "shift": 0.0})) == 0
    assert np.isfinite(float(pipeline.step({**next(batches(1)), "shift": 1.0})))
    assert pipeline.digest() != before
    pipeline.close()
    with pytest.raises(UserError, match="is no weight of a batch"):
        trained("serial", weight=lambda batch: -1.0)
