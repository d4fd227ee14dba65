"""Models read features of events, items and users; cold-start items are represented by their features."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nestrec.base.config_overrides import apply_overrides
from nestrec.base.errors import UserError, UserErrorGroup
from nestrec.data.dataset import Dataset
from nestrec.data.samples.feature_inputs import Inputs
from nestrec.data.samples.retrieval_inputs import RetrievalInputConfig, _target_weight_table
from nestrec.data.samples.split import item_counts, split_leave_one_out
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine
from nestrec.tasks.table_overrides import TableOverrides, resolve_tables
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
    "batch.batch_size": "12",
    "batch.num_micro_batches": "2",
    "training.max_steps": "3",
    "training.eval_every_epochs": "0",
}
FEATURES = {
    "task.inputs.item_features": ",".join(ITEM_FEATURES),
    "task.inputs.event_features": ",".join(EVENT_FEATURES),
    "task.inputs.user_features": ",".join(USER_FEATURES),
}
RECIPE_OPTIONS = {
    "demo": {
        "data.synthetic": "none",
        "task.history.max_events": "12",
        "task.encoder.max_length": "12",
        "task.negatives.num_negatives": "4",
        "task.evaluation.ks": "5,10",
        "task.inputs.context_features": "device,place",
        "task.inputs.target_actions": "click,buy",
        "task.inputs.action_weights": "buy=3",
    },
    "ranking": {"task.encoder.max_length": "16", "task.history.max_events": "8"},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_featured_log(tmp_path_factory.mktemp("featured"))


def config_of(name: str, data: Path, **overrides: str) -> RunConfig:
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return apply_overrides(
        recipe(name), {**SMALL, **FEATURES, **RECIPE_OPTIONS[name], "data.folder": str(data), **dotted}
    )


@pytest.mark.parametrize("name", ["demo", pytest.param("ranking", marks=pytest.mark.slow)])
def test_features_of_every_kind_nested_equals_serial_bitwise(data, tmp_path, name):
    def trained(schedule: str) -> tuple[list[str], float]:
        cfg = config_of(name, data, pipeline__schedule=schedule, tables__brand__dim="4", tables__tags__pooling="sum")
        trainer = Trainer(cfg, tmp_path / f"{name}-{schedule}", Topology.single())
        trainer.train()
        engine = trainer.session.engine
        return [engine.digest(table) for table in engine.tables], trainer.evaluate("test").score

    digests, score = trained("serial")
    assert trained("nested") == (digests, score)
    assert len(digests) == 8, "one table for items, and one for each category, list and text"
    assert np.isfinite(score)


@pytest.mark.parametrize("name", ["demo", "ranking"])
def test_user_prefix_tokens_nested_equals_serial_bitwise(data, tmp_path, name):
    def trained(schedule: str) -> tuple[str, float]:
        alone = {"task__evaluation__baselines": "[]"}
        window = {"task__encoder__attention__window": "4", "task__inputs__user_feature_mode": "prefix"}
        cfg = config_of(name, data, pipeline__schedule=schedule, **window, **alone)
        trainer = Trainer(cfg, tmp_path / f"{name}-{schedule}", Topology.single())
        before = trainer.session.engine.digest("user_country")
        trainer.train()
        task = trainer.session.task
        engine = trainer.session.engine
        assert engine.digest("user_country") != before, "the table of the prefix feature is trained"
        assert task.model.encoder.position.shape[0] == cfg.task.encoder.max_length + len(USER_FEATURES) + 11
        assert [layer.rules.num_context for layer in task.model.encoder.layers] == [3, 3]
        return engine.digest("user_country"), trainer.evaluate("test").score

    assert trained("nested") == trained("serial")


def test_feature_interactions_nested_equals_serial_bitwise(data, tmp_path):
    def trained(schedule: str) -> tuple[list[str], float]:
        dlrm = {
            "task__head__interactions": "true",
            "task__encoder__num_layers": "0",
            "task__evaluation__baselines": "[]",
        }
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


def test_user_prefix_tokens_require_user_features(data):
    cfg = config_of("ranking", data, task__inputs__user_feature_mode="prefix", task__inputs__user_features="[]")
    with pytest.raises(UserError, match=r"task.inputs.user_feature_mode"):
        make_task(cfg.task, Dataset.open(data), seed=1, dtype="float32")


@pytest.fixture(scope="module")
def retrieval(data):
    return make_task(config_of("demo", data).task, Dataset.open(data), seed=1, dtype="float32")


def test_id_dropout_depends_on_the_sample_not_on_the_batch(retrieval):
    def dropped_ids(samples: np.ndarray) -> dict[str, np.ndarray]:
        collator = retrieval.collator
        batch = collator.collate(samples, collator.read(samples), epoch=3)
        num_items = len(batch.keys["item"])
        return {n: (t.numpy() >= num_items) for n, t in batch.tensors.items() if n.startswith("at/")}

    both, one, other = (dropped_ids(np.array(samples)) for samples in ([2, 5], [2], [5]))
    assert set(both) == {"at/history", "at/positive", "at/negative"}
    for use, is_dropped in both.items():
        assert np.array_equal(is_dropped, np.concatenate([one[use], other[use]])), use
    dropped = dropped_ids(np.arange(20))
    assert 0.02 < dropped["at/negative"].mean() < 0.5


def test_cold_start_item_is_represented_by_features_only(retrieval, data):
    dataset = Dataset.open(data)
    keys = dataset.items()["item_key"].to_pylist()
    ids = np.array([keys.index("n0") + 1, keys.index("i0") + 1])
    counts = item_counts(dataset, split_leave_one_out(dataset.lengths).train_end)
    assert (counts[ids] > 0).tolist() == [False, True]
    at = retrieval._inputs.collate_items(ids).tensors["at/item"]
    assert (at >= 2).tolist() == [True, False], "vectors without ids are in the second half"


@pytest.mark.parametrize("loss", ["full", "sampled_softmax"])
def test_cold_start_item_is_never_a_negative(data, loss):
    """It is never a target, so as a negative of every step its features would be learned to be wrong."""
    dataset = Dataset.open(data)
    task = make_task(config_of("demo", data, task__loss=loss).task, dataset, seed=1, dtype="float32")
    is_trained = item_counts(dataset, split_leave_one_out(dataset.lengths).train_end) > 0
    samples = np.arange(len(task.collator.tokens))
    batch = task.collator.collate(samples, task.collator.read(samples), epoch=0)
    assert is_trained[batch.keys["item"]].all()
    assert not is_trained[1:].all()
    if loss == "full":
        catalog = batch.keys["item"][batch.tensors["at/catalog"].numpy() % len(batch.keys["item"])]
        assert np.array_equal(catalog, np.flatnonzero(is_trained))
        assert np.array_equal(catalog[batch.tensors["target_at"].numpy()], batch.tensors["target"].numpy())


def test_target_weights_depend_on_actions(retrieval, data):
    collator = retrieval.collator
    samples = np.arange(len(collator.tokens))
    batch = collator.collate(samples, collator.read(samples), epoch=0)
    weights = batch.tensors["target_weight"].numpy()
    assert set(weights.tolist()) == {0.0, 1.0, 3.0}
    assert collator.weight(samples, 0) == pytest.approx(weights.sum())
    assert (collator.weights > 0).all(), "users without targets are not samples"


def test_task_without_features_has_only_the_item_table(data):
    plain = replace(config_of("demo", data).task, inputs=RetrievalInputConfig(id_dropout=0.5))
    task = make_task(plain, Dataset.open(data), seed=1, dtype="float32")
    assert [table.name for table in task.tables] == ["items"]
    samples = np.arange(4)
    batch = task.collator.collate(samples, task.collator.read(samples), epoch=0)
    assert set(batch.keys) == {"history", "positive", "negative"}
    assert [name for name, _ in task.model.named_parameters() if "to_width" in name] == []


def test_features_missing_in_the_dataset_get_suggestions(data):
    wrong = config_of("demo", data, task__inputs__item_features="brnd", task__inputs__context_features="devise")
    with pytest.raises(UserErrorGroup) as raised:
        make_task(wrong.task, Dataset.open(data), seed=1, dtype="float32")
    remedies = {error.option: str(error.remedy) for error in raised.value.errors}
    assert "did you mean 'brand'" in remedies["task.inputs.item_features"]
    assert "did you mean 'device'" in remedies["task.inputs.context_features"]


def test_pooling_weighted_requires_weights(data):
    wrong = config_of("ranking", data, tables__tags__pooling="weighted")
    with pytest.raises(UserError, match=r"tables\.item_tags\.pooling=weighted"):
        make_task(wrong.task, Dataset.open(data), seed=1, dtype="float32", tables=wrong.tables)


def test_retrieval_loss_counts_targets_by_their_weights(data):
    model = make_task(config_of("demo", data).task, Dataset.open(data), seed=1, dtype="float32").model

    def loss(weights: str) -> float:
        cfg = config_of("demo", data, task__inputs__action_weights=weights)
        task = make_task(cfg.task, Dataset.open(data), seed=1, dtype="float32")
        task.model.load_state_dict(model.state_dict())
        task.model.eval()
        return _loss_of("retrieval", task, EmbeddingEngine(task.tables, Topology.single()), np.arange(6))

    loss_1, loss_4, loss_7 = loss("buy=1"), loss("buy=4"), loss("buy=7")
    assert 0 < loss_1 < loss_4
    assert loss_7 - loss_4 == pytest.approx(loss_4 - loss_1, rel=1e-4)
    assert loss("buy=2,click=2") == pytest.approx(2 * loss_1)


@pytest.mark.parametrize("id_dropout", ["0", "0.5"])
def test_full_softmax_loss_equals_reference_over_trained_items(data, id_dropout):
    """Reference implementation: cross entropy over the items with training events, with their ids or without them."""
    common = {
        "task__inputs__target_actions": "[]",
        "task__inputs__action_weights": "buy=1",
        "task__table_init__scale": "1",
    }
    cfg = config_of("demo", data, task__loss="full", task__inputs__id_dropout=id_dropout, **common)
    task = make_task(cfg.task, Dataset.open(data), seed=1, dtype="float32")
    engine = EmbeddingEngine(task.tables, Topology.single())
    samples = np.arange(5)
    batch = task.collator.collate(samples, task.collator.read(samples), 0)
    trained_items = np.flatnonzero(task._item_counts)
    assert len(trained_items) < task._dataset.num_items, "some items have no training event"
    looked_up = engine.lookup_readonly(batch.keys)
    with_id = task.item_tower._pair(lambda name: task.item_tower._vectors.from_lookup(name, batch, looked_up))
    history_TD = with_id[batch.tensors["at/history"]]
    item_ND = task.model.item_vectors(with_id[batch.tensors["at/catalog"]])
    tokens_TD = task.item_tower._tokens(
        history_TD, lambda name: task.item_tower._vectors.from_lookup(name, batch, looked_up)
    )
    task.model.eval()
    query_TD = task.model(tokens_TD, sequence_info(batch), None)
    at = torch.from_numpy(np.searchsorted(trained_items, batch.tensors["target"].numpy()))
    expected = torch.nn.functional.cross_entropy(query_TD @ item_ND.T, at, reduction="sum").detach()
    assert _loss_of("retrieval", task, engine, samples) == pytest.approx(expected.item(), rel=1e-4)
    has_id = (batch.tensors["at/catalog"] < len(batch.keys["item"])).double().mean()
    assert abs(has_id - (1 - float(id_dropout))) < 0.3


@pytest.mark.parametrize("name", ["demo", "ranking"])
def test_pooling_of_lists_is_mean_by_default(data, name):
    cfg = config_of(name, data)
    task = task_spec(cfg.task).make(cfg.task, Dataset.open(data), seed=1, dtype="float32")
    assert task.bags
    assert task.pooling == dict.fromkeys(task.bags, "mean")
    task.set_tables(resolve_tables(task.tables, {"tags": TableOverrides(pooling="sum")}, task.bags))
    assert set(task.pooling.values()) >= {"sum"}


def test_listwise_evaluation_runs_on_the_test_split_only(data):
    cfg = config_of("ranking", data, task__evaluation__listwise_events="40", task__evaluation__baselines="[]").task
    task = make_task(cfg, Dataset.open(data), seed=1, dtype="float32")
    engine = EmbeddingEngine(task.tables, Topology.single())
    systems = {part: set(task.evaluate(engine, part).metrics) for part in ("valid", "test")}
    assert systems == {"valid": {"model"}, "test": {"model", "model, at once"}}


def test_action_weights_may_be_zero_but_not_negative():
    card = SimpleNamespace(action_bits={"click": 1, "buy": 2})
    cfg = RetrievalInputConfig(target_actions=("click", "buy"), action_weights={"buy": 0.0})
    # Indexed by action mask: none, click, buy, both.
    assert _target_weight_table(card, cfg).tolist() == [0, 1, 0, 1]
    for weights, field in (
        ({"buy": -1.0}, "task.inputs.action_weights.buy"),
        ({"by": 1.0}, "task.inputs.action_weights"),
    ):
        with pytest.raises((UserError, UserErrorGroup)) as raised:
            _target_weight_table(card, replace(cfg, action_weights=weights))
        assert {error.option for error in getattr(raised.value, "errors", [raised.value])} == {field}


def test_missing_numbers_are_zero_with_an_indicator():
    inputs = Inputs()
    inputs.add_numbers("place", np.array([0.5, np.nan, 0.0], np.float32))
    assert inputs.tensors["place"].tolist() == [[0.5, 0.0], [0.0, 1.0], [0.0, 0.0]]
