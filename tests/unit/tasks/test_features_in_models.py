"""Models read features of events, items and users; what nobody has seen is known by what it is."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import nestrec
from nestrec.base.config import with_overrides
from nestrec.base.errors import UserErrors
from nestrec.data.dataset import Dataset
from nestrec.data.samples.retrieval import RetrievalQueries
from nestrec.data.samples.retrieval_inputs import RetrievalInputConfig
from nestrec.data.samples.split import leave_one_out
from nestrec.data.samples.training_events import item_counts
from nestrec.distributed import Topology
from nestrec.serving.model.export import export_run
from nestrec.tasks.built_in import make_task
from nestrec.testing.featured_log import EVENT_FEATURES, ITEM_FEATURES, USER_FEATURES, write_featured_log
from nestrec.training.config import RunConfig
from nestrec.training.recipes import recipe
from nestrec.training.trainer import Trainer

SMALL = {
    "task.encoder.dim": "8",
    "task.encoder.head_dim": "4",
    "training.device": "cpu",
    "batch.batch_samples": "12",
    "batch.micro_batches": "2",
    "training.max_steps": "3",
    "training.evaluate_every_epochs": "0",
}
FEATURES = {
    "task.inputs.item_features": ",".join(ITEM_FEATURES),
    "task.inputs.event_features": ",".join(EVENT_FEATURES),
    "task.inputs.user_features": ",".join(USER_FEATURES),
}
OF_RECIPE = {
    "demo": {
        "data.synthetic": "none",
        "task.history.max_length": "12",
        "task.encoder.max_length": "12",
        "task.num_negatives": "4",
        "task.evaluation.ks": "5,10",
        "task.inputs.context": "device,place",
        "task.inputs.actions": "click,buy",
        "task.inputs.action_weights": "buy=3",
    },
    "ranking": {"task.encoder.max_length": "16", "task.inputs.max_events": "8"},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_featured_log(tmp_path_factory.mktemp("featured"))


def config_of(name: str, data: Path, **more: str) -> RunConfig:
    dotted = {key.replace("__", "."): value for key, value in more.items()}
    return with_overrides(recipe(name), {**SMALL, **FEATURES, **OF_RECIPE[name], "data.folder": str(data), **dotted})


@pytest.mark.parametrize("name", ["demo", "ranking"])
def test_with_features_of_every_kind_nested_equals_serial_bit_for_bit(data, tmp_path, name):
    def trained(schedule: str) -> tuple[list[str], float]:
        cfg = config_of(name, data, pipeline__schedule=schedule, tables__brand__dim="4", tables__tags__pooling="sum")
        trainer = Trainer(cfg, tmp_path / f"{name}-{schedule}", Topology.single())
        trainer.train()
        engine = trainer.session.engine
        return [engine.digest(table) for table in engine.tables], trainer.evaluate("test").score

    digests, score = trained("serial")
    assert trained("nested") == (digests, score)
    assert len(digests) == 8, "items, and a table for each category, list and text"
    assert np.isfinite(score)


@pytest.fixture(scope="module")
def retrieval(data):
    return make_task(config_of("demo", data).task, Dataset.open(data), seed=1, dtype="float32")


def test_which_ids_are_left_out_depends_on_the_sample_and_not_on_its_company(retrieval):
    def left_out(samples: np.ndarray) -> dict[str, np.ndarray]:
        assembler = retrieval.assembler
        batch = assembler.assemble(samples, assembler.read(samples), epoch=3)
        num_items = len(batch.keys["item"])
        return {n: (t.numpy() >= num_items) for n, t in batch.tensors.items() if n.startswith("at/")}

    both, one, other = (left_out(np.array(samples)) for samples in ([2, 5], [2], [5]))
    assert set(both) == {"at/history", "at/positive", "at/negative"}
    for use, found in both.items():
        assert np.array_equal(found, np.concatenate([one[use], other[use]])), use
    every = left_out(np.arange(20))
    assert 0.02 < every["at/negative"].mean() < 0.5


def test_an_item_that_nobody_trained_on_is_known_by_its_features_alone(retrieval, data):
    dataset = Dataset.open(data)
    keys = dataset.items()["item_key"].to_pylist()
    ids = np.array([keys.index("n0") + 1, keys.index("i0") + 1])
    counts = item_counts(dataset, leave_one_out(dataset.lengths).train_end)
    assert (counts[ids] > 0).tolist() == [False, True]
    at = retrieval._inputs.of_items(ids).tensors["at/item"]
    assert (at >= 2).tolist() == [True, False], "the second half of the vectors is without ids"


def test_targets_count_by_their_actions(retrieval, data):
    assembler = retrieval.assembler
    samples = np.arange(len(assembler.tokens))
    batch = assembler.assemble(samples, assembler.read(samples), epoch=0)
    weights = batch.tensors["target_weight"].numpy()
    assert set(weights.tolist()) == {0.0, 1.0, 3.0}
    assert assembler.weight(samples, 0) == pytest.approx(weights.sum())
    assert (assembler.weights > 0).all(), "who has nothing to find is no sample"


def test_without_features_nothing_is_added(data):
    plain = replace(config_of("demo", data).task, inputs=RetrievalInputConfig(id_dropout=0.5))
    task = make_task(plain, Dataset.open(data), seed=1, dtype="float32")
    assert [table.name for table in task.tables] == ["items"]
    samples = np.arange(4)
    batch = task.assembler.assemble(samples, task.assembler.read(samples), epoch=0)
    assert set(batch.keys) == {"history", "positive", "negative"}
    assert [name for name, _ in task.model.named_parameters() if "to_width" in name] == []


def test_what_the_dataset_does_not_have_is_named_with_what_it_has(data):
    wrong = config_of("demo", data, task__inputs__item_features="brnd", task__inputs__context="devise")
    with pytest.raises(UserErrors) as refused:
        make_task(wrong.task, Dataset.open(data), seed=1, dtype="float32")
    told = {error.field: str(error.remedy) for error in refused.value.errors}
    assert "did you mean 'brand'" in told["task.inputs.item_features"]
    assert "did you mean 'device'" in told["task.inputs.context"]


def trained_and_exported(name: str, data: Path, folder: Path) -> tuple[Trainer, "nestrec.Recommender"]:
    """Of events and users, servers take categories and numbers; of items, everything."""
    cfg = config_of(name, data, task__inputs__event_features="device,place", task__inputs__user_features="country,age")
    trainer = Trainer(cfg, folder / "run", Topology.single())
    trainer.train()
    export_run(folder / "run", folder / "out", best=False)
    return trainer, nestrec.load(folder / "out")


def request_of(dataset: Dataset, user: int, length: int) -> tuple[dict, dict, str]:
    """The first events of a user as a request tells them, the context of the next one, and its item."""
    rows = dataset.rows(np.array([user]))
    keys = dataset.items()["item_key"].to_pylist()
    devices = [None, *dataset.vocabulary("event_device")["key"].to_pylist()]
    countries = [None, *dataset.vocabulary("user_country")["key"].to_pylist()]
    of = {name: values for name, (values, _) in rows.lists.items()}
    places = [None if np.isnan(value) else float(value) for value in of["event_place"]]
    named = [devices[i] for i in of["event_device"]]
    history = {
        "items": [keys[i - 1] for i in of["item_ids"][:length]],
        "times_ms": of["timestamps_ms"][:length],
        "actions": of["actions"][:length].astype(int).tolist(),
        "features": {"device": named[:length], "place": places[:length]},
        "user_features": {
            "country": countries[int(rows.scalars["user_country"][0])],
            "age": float(rows.scalars["user_age"][0]),
        },
        "now_ms": int(of["timestamps_ms"][length]),
    }
    return history, {"device": named[length], "place": places[length]}, keys[of["item_ids"][length] - 1]


def test_served_scores_of_ranking_are_those_of_the_model_that_was_trained(data, tmp_path):
    trainer, served = trained_and_exported("ranking", data, tmp_path)
    task, dataset = trainer.session.task, Dataset.open(data)
    for user, length in ((3, 4), (8, 5)):
        history, context, item = request_of(dataset, user, length)
        batch = task._inputs.slices(task._inputs.read(np.array([user])), np.array([0]), np.array([length + 1]), epoch=0)
        offline = task._logits(trainer.session.engine, batch)[-1]
        found = served.rank(history, [item], context=context).scores
        np.testing.assert_allclose([scores[0] for scores in found.values()], offline, rtol=1e-4, atol=1e-5)
        other = served.rank(history, [item], context={**context, "place": 99.0}).scores
        assert abs(other["click"][0] - found["click"][0]) > 1e-6, "the context says something"


def test_served_scores_of_retrieval_are_those_of_the_model_that_was_trained(data, tmp_path):
    trainer, served = trained_and_exported("demo", data, tmp_path)
    task, dataset, engine = trainer.session.task, Dataset.open(data), trainer.session.engine
    queries = RetrievalQueries(
        task._read, task._split, task.cfg.history, "test", use_times=task._use_times, inputs=task._inputs
    )
    everything = np.arange(1, dataset.num_items + 1)
    compared = task.side.scored(task.side.content(engine, everything)).double()
    for query in (0, 7):
        user, length = int(queries.users[query]), int(queries.target_at[query])
        states = task.side.states(engine, queries.assemble(np.array([query])))
        offline = (compared @ states[-1].double()).numpy()
        history, context, _ = request_of(dataset, user, length)
        keys = dataset.items()["item_key"].to_pylist()
        found = served.rank(history, keys, context=context).scores["score"]
        np.testing.assert_allclose(found, offline, rtol=1e-4, atol=1e-4)
        best = served.recommend(history, 5, exclude_seen=False, context=context)
        assert best.items[0] == keys[int(offline.argmax())]
