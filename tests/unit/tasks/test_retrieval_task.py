"""Evaluation of retrieval: ranks against a plain definition, for every filter and protocol."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from nestrec.base.config_overrides import with_overrides
from nestrec.base.errors import UserError, UserErrorGroup
from nestrec.base.random import fold, fold_array
from nestrec.data.dataset import Dataset
from nestrec.data.samples.retrieval_collator import RetrievalQueries
from nestrec.data.samples.time_windows import TrainingChunks
from nestrec.data.synthetic import synthetic_logs as synthetic
from nestrec.distributed import Topology
from nestrec.models.backbone_registry import activations_of, flops_of
from nestrec.tasks import item_tower
from nestrec.tasks.catalog_ranks import CatalogRanker, ranks_of_slices
from nestrec.tasks.retrieval_task import RetrievalTaskConfig, _features
from nestrec.tasks.task import sequence_info
from nestrec.tasks.task_registry import _loss_of
from nestrec.training.recipes import recipe
from nestrec.training.training_session import Session


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "tiny"
    synthetic.generate(synthetic.preset("tiny", num_users=60, num_items=40), folder)
    return folder


def session_of(data, **overrides):
    given = {"data.folder": str(data), "training.device": "cpu", "task.num_negatives": "16", **overrides}
    cfg = with_overrides(recipe("demo"), given)
    return Session.open(cfg, Topology.single())


def plain_rank(session, queries, user, filter_seen):
    """The definition: score every item, sort by (score, id), look for the target."""
    batch = queries.assemble(np.array([user]))
    task = session.task
    table = torch.arange(1, session.dataset.num_items + 1)
    vectors = task.model.item_vectors(session.engine.lookup_readonly({"positive": table.numpy()})["positive"]).double()
    history = session.engine.lookup_readonly({"history": batch.keys["history"]})["history"]
    task.model.eval()
    state = task.model(history, sequence_info(batch))[-1].double()
    scores = vectors @ state
    excluded = {"none": [], "input": batch.keys["history"], "history": batch.tensors["seen"].numpy()}[filter_seen]
    scores[torch.as_tensor(np.asarray(excluded, dtype=np.int64)) - 1] = -torch.inf
    order = sorted(range(len(scores)), key=lambda i: (-scores[i].item(), i))
    target = int(batch.tensors["target"][0]) - 1
    return order.index(target) + 1 if torch.isfinite(scores[target]) else 0


@pytest.mark.parametrize("filter_seen", ["none", "input", "history"])
def test_ranks_equal_the_plain_definition(data, filter_seen):
    session = session_of(
        data,
        **{
            "task.evaluation.ks": "40",
            "task.evaluation.filter_seen": filter_seen,
            "task.evaluation.headline": "ndcg@40",
            "task.evaluation.batch_users": "7",
            "task.history.max_length": "10",
            "task.encoder.max_length": "10",
        },
    )
    evaluation = session.task.evaluate(session.engine, "test")
    details = evaluation.details
    history = session.cfg.task.history
    queries = RetrievalQueries(session.dataset, session.task._split, history, "test", use_times=True)
    expected = [plain_rank(session, queries, user, filter_seen) for user in details["users"]]
    assert details["rank/model"].tolist() == expected
    assert (filter_seen != "none") == (0 in expected), "in these logs users return to items"
    barred = f"{expected.count(0)} of {len(expected)} targets"
    measured = f"measured on {len(expected)} targets of {len(expected)} users"
    notes = [note.partition(" (")[0] for note in evaluation.notes]
    assert notes == ([barred] if filter_seen != "none" else []) + [measured]


def test_evaluation_creates_no_row_and_leaves_weights_alone(data):
    session = session_of(data)
    before = session.engine.digest("items")
    session.task.evaluate(session.engine, "valid")
    assert session.engine.digest("items") == before
    assert session.task.model.training


def test_the_sampled_protocol_ranks_among_unseen_items_and_refuses_too_many(data):
    session = session_of(data, **{"task.evaluation.sampled_negatives": "5"})
    rank = session.task.evaluate(session.engine, "test").details["rank/model, sampled"]
    assert rank.min() >= 1
    assert rank.max() <= 6
    session = session_of(data, **{"task.evaluation.sampled_negatives": "39"})
    with pytest.raises(UserError, match="unseen items"):
        session.task.evaluate(session.engine, "test")


def test_popularity_counts_training_events_only(data):
    session = session_of(
        data, **{"task.evaluation.filter_seen": "none", "task.evaluation.ks": "40", "task.evaluation.headline": "hr@40"}
    )
    details = session_of(
        data,
        **{"task.evaluation.filter_seen": "none", "task.evaluation.ks": "40", "task.evaluation.headline": "ndcg@40"},
    )
    rank = details.task.evaluate(details.engine, "test").details["rank/popularity"]
    dataset = session.dataset
    split = session.task._split
    items, offsets = dataset.rows(np.arange(dataset.num_samples)).lists["item_ids"]
    count = np.zeros(dataset.num_items + 1, dtype=int)
    for user, start in enumerate(offsets[:-1]):
        np.add.at(count, items[start : start + split.train_end[user]], 1)
    order = sorted(range(1, dataset.num_items + 1), key=lambda i: (-count[i], i))
    targets = [items[offsets[u] + split.valid_end[u]] for u in split.users_with("test")]
    assert rank.tolist() == [order.index(t) + 1 for t in targets]


def test_a_time_bias_without_timestamps_is_refused(data, tmp_path):
    card = (data / "card.json").read_text()
    assert '"has_timestamps": true' in card
    session = session_of(data)
    without_times = replace(session.dataset.card, has_timestamps=False)
    dataset = Dataset.open(data)
    dataset.card = without_times
    with pytest.raises(UserError, match="needs timestamps"):
        type(session.task)(session.cfg.task, dataset, seed=0, dtype="float32")


def test_sampled_protocol_counts_ties_against_the_target(data):
    session = session_of(data, **{"task.evaluation.sampled_negatives": "5", "task.item_init.kind": "zeros"})
    rank = session.task.evaluate(session.engine, "test").details["rank/model, sampled"]
    assert set(rank.tolist()) == {6}, "all items have the same score"


@pytest.mark.parametrize(
    ("given", "field", "told"),
    [
        ({"task.negatives.sampler": "in_batch"}, "task.negatives.sampler", "tokens meet those of others"),
        ({"task.negatives.sampler": "groups"}, "task.negatives.sampler", "tokens meet those of others"),
        ({"task.negatives.sharing": "2"}, "task.negatives.sharing", "tokens meet those of others"),
        ({"task.inputs.item_features": "topic"}, "task.inputs.item_features", "looked up for whole samples"),
    ],
)
def test_samples_that_need_to_be_whole_are_not_divided(data, given, field, told):
    task = session_of(data, **given).task
    with pytest.raises((UserError, UserErrorGroup)) as refused:
        task.take_context(None)
    [error] = getattr(refused.value, "errors", [refused.value])
    assert error.option == field
    assert told in str(error)


def test_samples_of_tokens_alone_can_be_divided(data):
    session_of(data).task.take_context(None)


def test_groups_of_all_tokens_make_each_a_negative_of_the_others(data):
    """One group is a softmax over the targets of the batch, by the definition."""
    found = {}
    for log_q in ("false", "true"):
        given = {"task.negatives.sampler": "groups", "task.num_negatives": "60", "task.negatives.log_q": log_q}
        session = session_of(data, **given, **{"task.encoder.dropout": "0", "task.item_init.scale": "1"})
        task = session.task
        engine = session.engine
        task.model.eval()
        samples = np.arange(2)
        batch = task.assembler.assemble(samples, task.assembler.read(samples), 0)
        assert batch.num_tokens <= 61
        state_TD = task.side.states(engine, batch)
        target_TD = task.side.scored(task.item_content(engine, batch.keys["positive"]))
        logit_TT = state_TD.double() @ target_TD.double().T
        if log_q == "true":
            logit_TT += batch.tensors["target_bias"].double() * ~torch.eye(batch.num_tokens, dtype=torch.bool)
        target = batch.tensors["target"]
        is_same = (target[:, None] == target[None, :]) & ~torch.eye(batch.num_tokens, dtype=torch.bool)
        expected = -logit_TT.masked_fill(is_same, -torch.inf).log_softmax(1).diagonal().sum()
        found[log_q] = _loss_of("retrieval", task, engine, samples)
        assert found[log_q] == pytest.approx(float(expected), rel=1e-4)
    assert found["true"] != pytest.approx(found["false"], rel=1e-3)


@pytest.mark.parametrize("filter_seen", ["none", "input", "history"])
def test_ranks_of_slices_equal_those_of_queries(data, filter_seen):
    ks = {"task.evaluation.ks": "20", "task.evaluation.headline": "ndcg@20", "task.evaluation.batch_users": "7"}
    small = {"task.history.max_length": "10", "task.encoder.max_length": "10", "task.evaluation.baselines": "[]"}
    session = session_of(data, **{"task.evaluation.filter_seen": filter_seen, **ks, **small})
    task = session.task
    engine = session.engine
    details = task.evaluate(engine, "test").details
    users = details["users"]
    end = task._split.test_end[users].astype(np.int64)

    def ranks(first, end, scored):
        rows = np.stack([users, first, end, scored], axis=1)
        slices = task._slices(TrainingChunks(rows, None), None)
        return ranks_of_slices(task.side, engine, slices, task.cfg.evaluation)

    assert ranks(np.maximum(0, end - 11), end, end - 1).tolist() == details["rank/model"].tolist()
    first = np.maximum(0, end - 6)
    together = ranks(first, end, end - 2).reshape(-1, 2)
    if filter_seen != "input":
        assert together[:, 1].tolist() == ranks(first, end, end - 1).tolist()
    assert together[:, 0].tolist() == ranks(first, end - 1, end - 2).tolist()


def test_retrieval_cost_counts_the_items_that_a_token_meets(data):
    sampled = session_of(data).task
    full = session_of(data, **{"task.loss": "full"}).task
    dim = sampled.cfg.encoder.dim
    num_items = full._dataset.num_items
    layers = flops_of(sampled.cfg.encoder)
    kept = activations_of(sampled.cfg.encoder)
    assert sampled.cost().flops == replace(layers, head=2.0 * dim * 16)
    assert sampled.cost().activations == kept + 16 * (dim + 2)
    assert full.cost().flops == replace(layers, head=2.0 * dim * num_items)
    assert full.cost().activations == kept + num_items


def test_item_content_has_the_width_of_the_model(data):
    session = session_of(data, **{"tables.items.dim": "12", "task.evaluation.sampled_negatives": "3"})
    task = session.task
    items = np.array([3, 1])
    rows = session.engine.lookup_readonly({"history": items})["history"]
    expected = rows @ task.model.to_width.matrices["of_items"].weight.T
    assert torch.equal(task.side.content(session.engine, items), expected)
    assert expected.shape == (2, task.cfg.encoder.dim) != rows.shape


def test_items_with_features_are_compared_chunk_by_chunk(data, monkeypatch):
    session = session_of(data, **{"task.inputs.item_features": "topic"})
    side = session.task.side
    engine = session.engine
    keys = np.arange(1, side.num_items + 1)
    expected = side.scored(side.content(engine, keys))
    asked = list[int]()
    content = side.content
    monkeypatch.setattr(item_tower, "_CHUNK_ITEMS", 7)
    monkeypatch.setattr(side, "content", lambda engine, items: asked.extend(items.tolist()) or content(engine, items))
    vectors = side.compared(engine)(None, torch.from_numpy(keys))
    torch.testing.assert_close(vectors, expected)
    assert asked == keys.tolist()


def test_sampled_items_are_drawn_by_the_key_of_the_user(data):
    session = session_of(data)
    task = session.task
    queries = RetrievalQueries(session.dataset, task._split, task.cfg.history, "test", use_times=True)
    batch = queries.assemble(queries.ids)
    target = batch.tensors["target"].tolist()
    offsets = batch.tensors["seen_offsets"].tolist()
    seen = [set(batch.tensors["seen"][a:b].tolist()) for a, b in itertools.pairwise(offsets)]
    unseen = [sorted(set(range(1, 41)) - had - {t}) for had, t in zip(seen, target, strict=True)]
    fewest = min(map(len, unseen))

    def candidates(count):
        cfg = replace(task.cfg.evaluation, sampled_negatives=count)
        ranker = CatalogRanker(task.side, session.engine, queries, cfg)
        return ranker._sampled_candidates(queries.users, batch).tolist()

    drawn = [
        sorted(items, key=dict(zip(items, fold_array(fold(0x5A, int(user)), np.array(items)), strict=True)).get)
        for user, items in zip(queries.users, unseen, strict=True)
    ]
    for count in (3, fewest):
        assert candidates(count) == [[t, *items[:count]] for t, items in zip(target, drawn, strict=True)]
    with pytest.raises(UserError, match=f"has only {fewest} unseen items"):
        candidates(fewest + 1)


def test_targets_are_counted_in_the_training_events(data):
    session = session_of(data, **{"task.evaluation.baselines": "[]"})
    split = session.task._split
    items, offsets = session.dataset.rows(np.arange(session.dataset.num_samples)).lists["item_ids"]
    count = np.zeros(session.dataset.num_items + 1, dtype=int)
    for user, start in enumerate(offsets[:-1]):
        np.add.at(count, items[start : start + split.train_end[user]], 1)
    details = session.task.evaluate(session.engine, "test").details
    targets = [items[offsets[user] + split.valid_end[user]] for user in details["users"]]
    assert details["item_events"].tolist() == count[targets].tolist()


def test_ease_is_left_out_of_larger_catalogs(data):
    num_items = Dataset.open(data).num_items
    makers = {}
    for most in (num_items - 1, num_items):
        session = session_of(data, **{"task.evaluation.ease_max_items": str(most)})
        makers[most] = session.task._results._makers(session.engine.device)
    assert ["ease" in found for found in makers.values()] == [False, True]


def test_only_samplers_of_other_items_read_negatives():
    cfg = RetrievalTaskConfig()
    read = {
        name: _features(replace(cfg, negatives=replace(cfg.negatives, sampler=name)))
        for name in ("uniform", "in_batch", "groups")
    }
    of_tokens = ("history", "positive")
    assert read == {"uniform": (*of_tokens, "negative"), "in_batch": of_tokens, "groups": of_tokens}
    assert _features(replace(cfg, loss="full")) == (*of_tokens, "catalogue")


def test_query_batches_count_all_of_their_tokens(data):
    session = session_of(data)
    task = session.task
    queries = RetrievalQueries(session.dataset, task._split, task.cfg.history, "test", use_times=True)
    batch = queries.assemble(queries.ids[:5])
    assert batch.num_tokens == len(batch.keys["history"]) == int(batch.tensors["offsets"][5])
