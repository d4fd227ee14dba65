"""Evaluation of retrieval: ranks compared with a reference implementation, for every filter and protocol."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from nestrec.base.config_overrides import apply_overrides
from nestrec.base.errors import UserError, UserErrorGroup
from nestrec.base.random import fold, fold_array
from nestrec.data.dataset import Dataset
from nestrec.data.samples.retrieval_collator import RetrievalQueries
from nestrec.data.samples.time_windows import TrainingChunks
from nestrec.data.synthetic import synthetic_logs as synthetic
from nestrec.distributed import Topology
from nestrec.models.backbone_registry import activations_of, flops_of
from nestrec.tasks import item_tower
from nestrec.tasks.catalog_ranks import CatalogRanker, rank_chunks
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
    options = {"data.folder": str(data), "training.device": "cpu", "task.negatives.num_negatives": "16", **overrides}
    cfg = apply_overrides(recipe("demo"), options)
    return Session.open(cfg, Topology.single())


def reference_rank(session, queries, user, filter_seen):
    """Reference implementation: scores all items, sorts by (score, id), and returns the rank of the target."""
    batch = queries.collate(np.array([user]))
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
def test_retrieval_ranks_equal_reference_implementation(data, filter_seen):
    session = session_of(
        data,
        **{
            "task.evaluation.ks": "40",
            "task.evaluation.filter_seen": filter_seen,
            "task.evaluation.main_metric": "ndcg@40",
            "task.evaluation.batch_size": "7",
            "task.history.max_events": "10",
            "task.encoder.max_length": "10",
        },
    )
    evaluation = session.task.evaluate(session.engine, "test")
    details = evaluation.details
    history = session.cfg.task.history
    queries = RetrievalQueries(session.dataset, session.task._split, history, "test", use_times=True)
    expected = [reference_rank(session, queries, user, filter_seen) for user in details["users"]]
    assert details["rank/model"].tolist() == expected
    assert (filter_seen != "none") == (0 in expected), "users of this log return to earlier items"
    filtered_note = f"{expected.count(0)} of {len(expected)} targets"
    measured_note = f"measured on {len(expected)} targets of {len(expected)} users"
    notes = [note.partition(" (")[0] for note in evaluation.notes]
    assert notes == ([filtered_note] if filter_seen != "none" else []) + [measured_note]


def test_retrieval_evaluation_creates_no_rows(data):
    session = session_of(data)
    before = session.engine.digest("items")
    session.task.evaluate(session.engine, "valid")
    assert session.engine.digest("items") == before
    assert session.task.model.training


def test_sampled_protocol_ranks_among_unseen_items(data):
    session = session_of(data, **{"task.evaluation.num_sampled_negatives": "5"})
    rank = session.task.evaluate(session.engine, "test").details["rank/model, sampled"]
    assert rank.min() >= 1
    assert rank.max() <= 6
    session = session_of(data, **{"task.evaluation.num_sampled_negatives": "39"})
    with pytest.raises(UserError, match="unseen items"):
        session.task.evaluate(session.engine, "test")


def test_popularity_baseline_counts_training_events_only(data):
    session = session_of(
        data,
        **{"task.evaluation.filter_seen": "none", "task.evaluation.ks": "40", "task.evaluation.main_metric": "hr@40"},
    )
    details = session_of(
        data,
        **{"task.evaluation.filter_seen": "none", "task.evaluation.ks": "40", "task.evaluation.main_metric": "ndcg@40"},
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


def test_time_bias_without_timestamps_is_rejected(data, tmp_path):
    card = (data / "card.json").read_text()
    assert '"has_timestamps": true' in card
    session = session_of(data)
    without_times = replace(session.dataset.card, has_timestamps=False)
    dataset = Dataset.open(data)
    dataset.card = without_times
    with pytest.raises(UserError, match="needs timestamps"):
        type(session.task)(session.cfg.task, dataset, seed=0, dtype="float32")


def test_sampled_protocol_counts_ties_against_the_target(data):
    session = session_of(data, **{"task.evaluation.num_sampled_negatives": "5", "task.table_init.kind": "zeros"})
    rank = session.task.evaluate(session.engine, "test").details["rank/model, sampled"]
    assert set(rank.tolist()) == {6}, "all items have the same score"


@pytest.mark.parametrize(
    ("overrides", "option", "message"),
    [
        ({"task.negatives.sampler": "in_batch"}, "task.negatives.sampler", "depends on tokens of other samples"),
        ({"task.negatives.sampler": "groups"}, "task.negatives.sampler", "depends on tokens of other samples"),
        ({"task.negatives.logit_sharing": "2"}, "task.negatives.logit_sharing", "depends on tokens of other samples"),
        ({"task.inputs.item_features": "topic"}, "task.inputs.item_features", "looked up for complete samples"),
    ],
)
def test_context_parallel_rejects_samples_that_cannot_be_split(data, overrides, option, message):
    task = session_of(data, **overrides).task
    with pytest.raises((UserError, UserErrorGroup)) as raised:
        task.set_context_ring(None)
    [error] = getattr(raised.value, "errors", [raised.value])
    assert error.option == option
    assert message in str(error)


def test_context_parallel_accepts_samples_of_tokens_only(data):
    session_of(data).task.set_context_ring(None)


def test_group_negatives_of_one_group_equal_in_batch_softmax(data):
    """The loss of one group equals a softmax over the targets of the batch."""
    losses = {}
    for log_q in ("false", "true"):
        options = {
            "task.negatives.sampler": "groups",
            "task.negatives.num_negatives": "60",
            "task.negatives.log_q": log_q,
        }
        session = session_of(data, **options, **{"task.encoder.dropout": "0", "task.table_init.scale": "1"})
        task = session.task
        engine = session.engine
        task.model.eval()
        samples = np.arange(2)
        batch = task.collator.collate(samples, task.collator.read(samples), 0)
        assert batch.num_tokens <= 61
        state_TD = task.item_tower.states(engine, batch)
        target_TD = task.item_tower.candidate_vectors(task.item_content(engine, batch.keys["positive"]))
        logit_TT = state_TD.double() @ target_TD.double().T
        if log_q == "true":
            logit_TT += batch.tensors["target_bias"].double() * ~torch.eye(batch.num_tokens, dtype=torch.bool)
        target = batch.tensors["target"]
        is_same = (target[:, None] == target[None, :]) & ~torch.eye(batch.num_tokens, dtype=torch.bool)
        expected = -logit_TT.masked_fill(is_same, -torch.inf).log_softmax(1).diagonal().sum()
        losses[log_q] = _loss_of("retrieval", task, engine, samples)
        assert losses[log_q] == pytest.approx(float(expected), rel=1e-4)
    assert losses["true"] != pytest.approx(losses["false"], rel=1e-3)


@pytest.mark.parametrize("filter_seen", ["none", "input", "history"])
def test_retrieval_chunk_ranks_equal_query_ranks(data, filter_seen):
    ks = {"task.evaluation.ks": "20", "task.evaluation.main_metric": "ndcg@20", "task.evaluation.batch_size": "7"}
    small = {"task.history.max_events": "10", "task.encoder.max_length": "10", "task.evaluation.baselines": "[]"}
    session = session_of(data, **{"task.evaluation.filter_seen": filter_seen, **ks, **small})
    task = session.task
    engine = session.engine
    details = task.evaluate(engine, "test").details
    users = details["users"]
    end = task._split.test_end[users].astype(np.int64)

    def ranks(first, end, scored):
        rows = np.stack([users, first, end, scored], axis=1)
        chunks = task._slices(TrainingChunks(rows, None), None)
        return rank_chunks(task.item_tower, engine, chunks, task.cfg.evaluation)

    assert ranks(np.maximum(0, end - 11), end, end - 1).tolist() == details["rank/model"].tolist()
    first = np.maximum(0, end - 6)
    together = ranks(first, end, end - 2).reshape(-1, 2)
    if filter_seen != "input":
        assert together[:, 1].tolist() == ranks(first, end, end - 1).tolist()
    assert together[:, 0].tolist() == ranks(first, end - 1, end - 2).tolist()


def test_retrieval_cost_counts_the_candidates_of_a_token(data):
    sampled = session_of(data).task
    full = session_of(data, **{"task.loss": "full"}).task
    dim = sampled.cfg.encoder.dim
    num_items = full._dataset.num_items
    layers = flops_of(sampled.cfg.encoder)
    encoder_activations = activations_of(sampled.cfg.encoder)
    assert sampled.cost().flops == replace(layers, head=2.0 * dim * 16)
    assert sampled.cost().activations == encoder_activations + 16 * (dim + 2)
    assert full.cost().flops == replace(layers, head=2.0 * dim * num_items)
    assert full.cost().activations == encoder_activations + num_items


def test_item_content_has_the_width_of_the_model(data):
    session = session_of(data, **{"tables.items.dim": "12", "task.evaluation.num_sampled_negatives": "3"})
    task = session.task
    items = np.array([3, 1])
    rows = session.engine.lookup_readonly({"history": items})["history"]
    expected = rows @ task.model.to_width.matrices["of_items"].weight.T
    assert torch.equal(task.item_tower.item_inputs(session.engine, items), expected)
    assert expected.shape == (2, task.cfg.encoder.dim) != rows.shape


def test_item_tower_scores_items_in_chunks(data, monkeypatch):
    session = session_of(data, **{"task.inputs.item_features": "topic"})
    tower = session.task.item_tower
    engine = session.engine
    keys = np.arange(1, tower.num_items + 1)
    expected = tower.candidate_vectors(tower.item_inputs(engine, keys))
    requested = list[int]()
    content = tower.item_inputs
    monkeypatch.setattr(item_tower, "_CHUNK_ITEMS", 7)
    monkeypatch.setattr(
        tower, "item_inputs", lambda engine, items: requested.extend(items.tolist()) or content(engine, items)
    )
    vectors = tower.row_transform(engine)(None, torch.from_numpy(keys))
    torch.testing.assert_close(vectors, expected)
    assert requested == keys.tolist()


def test_sampled_protocol_draws_items_by_user_key(data):
    session = session_of(data)
    task = session.task
    queries = RetrievalQueries(session.dataset, task._split, task.cfg.history, "test", use_times=True)
    batch = queries.collate(queries.ids)
    target = batch.tensors["target"].tolist()
    offsets = batch.tensors["seen_offsets"].tolist()
    seen = [set(batch.tensors["seen"][a:b].tolist()) for a, b in itertools.pairwise(offsets)]
    unseen = [sorted(set(range(1, 41)) - seen_items - {t}) for seen_items, t in zip(seen, target, strict=True)]
    fewest = min(map(len, unseen))

    def candidates(count):
        cfg = replace(task.cfg.evaluation, num_sampled_negatives=count)
        ranker = CatalogRanker(task.item_tower, session.engine, queries, cfg)
        return ranker._sampled_candidates(queries.users, batch).tolist()

    drawn = [
        sorted(items, key=dict(zip(items, fold_array(fold(0x5A, int(user)), np.array(items)), strict=True)).get)
        for user, items in zip(queries.users, unseen, strict=True)
    ]
    for count in (3, fewest):
        assert candidates(count) == [[t, *items[:count]] for t, items in zip(target, drawn, strict=True)]
    with pytest.raises(UserError, match=f"has only {fewest} unseen items"):
        candidates(fewest + 1)


def test_retrieval_targets_count_training_events(data):
    session = session_of(data, **{"task.evaluation.baselines": "[]"})
    split = session.task._split
    items, offsets = session.dataset.rows(np.arange(session.dataset.num_samples)).lists["item_ids"]
    count = np.zeros(session.dataset.num_items + 1, dtype=int)
    for user, start in enumerate(offsets[:-1]):
        np.add.at(count, items[start : start + split.train_end[user]], 1)
    details = session.task.evaluate(session.engine, "test").details
    targets = [items[offsets[user] + split.valid_end[user]] for user in details["users"]]
    assert details["item_events"].tolist() == count[targets].tolist()


def test_ease_baseline_is_skipped_for_large_catalogs(data):
    num_items = Dataset.open(data).num_items
    makers = {}
    for max_items in (num_items - 1, num_items):
        session = session_of(data, **{"task.evaluation.ease_max_items": str(max_items)})
        makers[max_items] = session.task._results._factories(session.engine.device)
    assert ["ease" in factories for factories in makers.values()] == [False, True]


def test_negative_samplers_determine_the_features_looked_up():
    cfg = RetrievalTaskConfig()
    read = {
        name: _features(replace(cfg, negatives=replace(cfg.negatives, sampler=name)))
        for name in ("uniform", "in_batch", "groups")
    }
    of_tokens = ("history", "positive")
    assert read == {"uniform": (*of_tokens, "negative"), "in_batch": of_tokens, "groups": of_tokens}
    assert _features(replace(cfg, loss="full")) == (*of_tokens, "catalog")


def test_retrieval_query_batches_count_all_tokens(data):
    session = session_of(data)
    task = session.task
    queries = RetrievalQueries(session.dataset, task._split, task.cfg.history, "test", use_times=True)
    batch = queries.collate(queries.ids[:5])
    assert batch.num_tokens == len(batch.keys["history"]) == int(batch.tensors["offsets"][5])
