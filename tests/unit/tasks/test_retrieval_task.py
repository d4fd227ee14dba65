"""Evaluation of retrieval: ranks against a plain definition, for every filter and protocol."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nestrec.base.config_overrides import with_overrides
from nestrec.base.errors import UserError
from nestrec.data.dataset import Dataset
from nestrec.data.samples.retrieval_collator import RetrievalQueries
from nestrec.data.synthetic import synthetic_logs as synthetic
from nestrec.distributed import Topology
from nestrec.tasks.task import sequence_info
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
    task, table = session.task, torch.arange(1, session.dataset.num_items + 1)
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
    dataset, split = session.dataset, session.task._split
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
