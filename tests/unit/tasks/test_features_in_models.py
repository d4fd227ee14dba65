"""Models read features of events, items and users; what nobody has seen is known by what it is."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nestrec.base.config_overrides import with_overrides
from nestrec.base.errors import UserError, UserErrorGroup
from nestrec.data.dataset import Dataset
from nestrec.data.samples.feature_inputs import Inputs
from nestrec.data.samples.retrieval_inputs import RetrievalInputConfig, _weights_of_masks
from nestrec.data.samples.split import item_counts, leave_one_out
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine
from nestrec.tasks.table_overrides import TableOverrides, chosen_tables
from nestrec.tasks.task import sequence_info
from nestrec.tasks.task_registry import _loss_of, make_task, task_spec
from nestrec.training.recipes import recipe
from nestrec.training.run_config import RunConfig
from nestrec.training.trainer import Trainer
from support.featured_log import EVENT_FEATURES, ITEM_FEATURES, USER_FEATURES, write_featured_log

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


@pytest.mark.parametrize("name", ["demo", pytest.param("ranking", marks=pytest.mark.slow)])
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


@pytest.mark.parametrize("name", ["demo", "ranking"])
def test_with_users_as_prefix_tokens_nested_equals_serial_bit_for_bit(data, tmp_path, name):
    def trained(schedule: str) -> tuple[str, float]:
        alone = {"task__evaluation__baselines" if name == "demo" else "task__baselines": "[]"}
        window = {"task__encoder__attention__window": "4", "task__inputs__user_tokens": "prefix"}
        cfg = config_of(name, data, pipeline__schedule=schedule, **window, **alone)
        trainer = Trainer(cfg, tmp_path / f"{name}-{schedule}", Topology.single())
        before = trainer.session.engine.digest("user_country")
        trainer.train()
        task = trainer.session.task
        engine = trainer.session.engine
        assert engine.digest("user_country") != before, "it is read, and learnt"
        assert task.model.encoder.position.shape[0] == cfg.task.encoder.max_length + len(USER_FEATURES) + 11
        assert [layer.rules.num_context for layer in task.model.encoder.layers] == [3, 3]
        return engine.digest("user_country"), trainer.evaluate("test").score

    assert trained("nested") == trained("serial")


def test_with_interactions_of_pooled_bags_nested_equals_serial_bit_for_bit(data, tmp_path):
    def trained(schedule: str) -> tuple[list[str], float]:
        dlrm = {"task__head__interactions": "true", "task__encoder__num_layers": "0", "task__baselines": "[]"}
        cfg = config_of("ranking", data, pipeline__schedule=schedule, tables__tags__dim="4", **dlrm)
        trainer = Trainer(cfg, tmp_path / schedule, Topology.single())
        trainer.train()
        task = trainer.session.task
        engine = trainer.session.engine
        num_features = 1 + len(ITEM_FEATURES) + len(EVENT_FEATURES) + len(USER_FEATURES)
        assert task.model.head[0].in_features == 2 * 8 + num_features * (num_features - 1) // 2
        assert task.bags == {"item_tags", "item_title_bag", "event_query", "user_languages"}
        return [engine.digest(table) for table in engine.tables], trainer.evaluate("test").score

    assert trained("nested") == trained("serial")


def test_prefix_tokens_need_a_feature_of_the_user(data):
    cfg = config_of("ranking", data, task__inputs__user_tokens="prefix", task__inputs__user_features="[]")
    with pytest.raises(UserError, match=r"task.inputs.user_tokens"):
        make_task(cfg.task, Dataset.open(data), seed=1, dtype="float32")


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


@pytest.mark.parametrize("loss", ["full", "sampled_softmax"])
def test_an_item_that_nobody_trained_on_is_no_negative(data, loss):
    """It is never a target: as a negative of every step, what it is would be learnt to be wrong."""
    dataset = Dataset.open(data)
    task = make_task(config_of("demo", data, task__loss=loss).task, dataset, seed=1, dtype="float32")
    known = item_counts(dataset, leave_one_out(dataset.lengths).train_end) > 0
    samples = np.arange(len(task.assembler.tokens))
    batch = task.assembler.assemble(samples, task.assembler.read(samples), epoch=0)
    assert known[batch.keys["item"]].all()
    assert not known[1:].all()
    if loss == "full":
        met = batch.keys["item"][batch.tensors["at/catalogue"].numpy() % len(batch.keys["item"])]
        assert np.array_equal(met, np.flatnonzero(known))
        assert np.array_equal(met[batch.tensors["target_at"].numpy()], batch.tensors["target"].numpy())


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
    with pytest.raises(UserErrorGroup) as refused:
        make_task(wrong.task, Dataset.open(data), seed=1, dtype="float32")
    told = {error.option: str(error.remedy) for error in refused.value.errors}
    assert "did you mean 'brand'" in told["task.inputs.item_features"]
    assert "did you mean 'device'" in told["task.inputs.context"]


def test_lists_without_weights_are_not_pooled_by_weight(data):
    wrong = config_of("ranking", data, tables__tags__pooling="weighted")
    with pytest.raises(UserError, match=r"tables\.item_tags\.pooling = 'weighted'"):
        make_task(wrong.task, Dataset.open(data), seed=1, dtype="float32", tables=wrong.tables)


def test_retrieval_loss_counts_targets_by_their_weights(data):
    model = make_task(config_of("demo", data).task, Dataset.open(data), seed=1, dtype="float32").model

    def loss(weights: str) -> float:
        cfg = config_of("demo", data, task__inputs__action_weights=weights)
        task = make_task(cfg.task, Dataset.open(data), seed=1, dtype="float32")
        task.model.load_state_dict(model.state_dict())
        task.model.eval()
        return _loss_of("retrieval", task, EmbeddingEngine(task.tables, Topology.single()), np.arange(6))

    once, more, most = loss("buy=1"), loss("buy=4"), loss("buy=7")
    assert 0 < once < more
    assert most - more == pytest.approx(more - once, rel=1e-4)
    assert loss("buy=2,click=2") == pytest.approx(2 * once)


@pytest.mark.parametrize("id_dropout", ["0", "0.5"])
def test_full_loss_compares_with_every_trained_item(data, id_dropout):
    """The definition: cross entropy over what items with training events are, with their ids and without."""
    alike = {"task__inputs__actions": "[]", "task__inputs__action_weights": "buy=1", "task__item_init__scale": "1"}
    cfg = config_of("demo", data, task__loss="full", task__inputs__id_dropout=id_dropout, **alike)
    task = make_task(cfg.task, Dataset.open(data), seed=1, dtype="float32")
    engine = EmbeddingEngine(task.tables, Topology.single())
    samples = np.arange(5)
    batch = task.assembler.assemble(samples, task.assembler.read(samples), 0)
    known = np.flatnonzero(task._item_counts)
    assert len(known) < task._dataset.num_items, "some items have no training event"
    looked_up = engine.lookup_readonly(batch.keys)
    with_id = task.side._pair(lambda name: task.side._vectors.of_looked_up(name, batch, looked_up))
    history_TD = with_id[batch.tensors["at/history"]]
    item_ND = task.model.item_vectors(with_id[batch.tensors["at/catalogue"]])
    tokens_TD = task.side._tokens(history_TD, lambda name: task.side._vectors.of_looked_up(name, batch, looked_up))
    task.model.eval()
    query_TD = task.model(tokens_TD, sequence_info(batch), None)
    at = torch.from_numpy(np.searchsorted(known, batch.tensors["target"].numpy()))
    expected = torch.nn.functional.cross_entropy(query_TD @ item_ND.T, at, reduction="sum").detach()
    assert _loss_of("retrieval", task, engine, samples) == pytest.approx(expected.item(), rel=1e-4)
    has_id = (batch.tensors["at/catalogue"] < len(batch.keys["item"])).double().mean()
    assert abs(has_id - (1 - float(id_dropout))) < 0.3


@pytest.mark.parametrize("name", ["demo", "ranking"])
def test_lists_are_pooled_by_mean_until_a_run_chooses(data, name):
    cfg = config_of(name, data)
    task = task_spec(cfg.task).make(cfg.task, Dataset.open(data), seed=1, dtype="float32")
    assert task.bags
    assert task.pooling == dict.fromkeys(task.bags, "mean")
    task.take(chosen_tables(task.tables, {"tags": TableOverrides(pooling="sum")}, task.bags))
    assert set(task.pooling.values()) >= {"sum"}


def test_lists_of_events_are_ranked_for_the_test_alone(data):
    cfg = config_of("ranking", data, task__at_once="40", task__baselines="[]").task
    task = make_task(cfg, Dataset.open(data), seed=1, dtype="float32")
    engine = EmbeddingEngine(task.tables, Topology.single())
    systems = {part: set(task.evaluate(engine, part).metrics) for part in ("valid", "test")}
    assert systems == {"valid": {"model"}, "test": {"model", "model, at once"}}


def test_action_weights_may_be_zero_and_not_negative():
    card = SimpleNamespace(action_bits={"click": 1, "buy": 2})
    cfg = RetrievalInputConfig(actions=("click", "buy"), action_weights={"buy": 0.0})
    # By mask: no action, click, buy, both.
    assert _weights_of_masks(card, cfg).tolist() == [0, 1, 0, 1]
    for weights, field in (
        ({"buy": -1.0}, "task.inputs.action_weights.buy"),
        ({"by": 1.0}, "task.inputs.action_weights"),
    ):
        with pytest.raises((UserError, UserErrorGroup)) as refused:
            _weights_of_masks(card, replace(cfg, action_weights=weights))
        assert {error.option for error in getattr(refused.value, "errors", [refused.value])} == {field}


def test_missing_numbers_are_zero_and_marked():
    found = Inputs()
    found.add_numbers("place", np.array([0.5, np.nan, 0.0], np.float32))
    assert found.tensors["place"].tolist() == [[0.5, 0.0], [0.0, 1.0], [0.0, 0.0]]
