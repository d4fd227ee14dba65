"""Collators of every task compared with plain loops: events of a sample, and keys that it looks up."""

from pathlib import Path

import numpy as np
import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.base.random import fold
from nestrec.data.batch_loader import Collator, MicroBatch
from nestrec.data.dataset import Dataset
from nestrec.data.flat_arrays import sample_keys
from nestrec.data.samples.chunk_collator import RankingChunkCollator, RetrievalChunkCollator
from nestrec.data.samples.feature_inputs import EventFeatures, prefix_columns
from nestrec.data.samples.negative_sampling import PopularitySampler
from nestrec.data.samples.ranking_collator import RankingInputConfig, RankingInputs
from nestrec.data.samples.retrieval_collator import HistoryConfig, RetrievalCollator
from nestrec.data.samples.split import sample_events, split_leave_one_out, stochastic_length
from nestrec.data.samples.time_windows import TrainingChunks
from nestrec.tasks.task_registry import make_task
from support.featured_log import USER_FEATURES, USER_VECTOR_FEATURES, write_featured_log
from support.tiny_runs import FAMILIES, config_of, make_datasets

CHUNKS = TrainingChunks(np.array([[4, 0, 5, 2], [1, 2, 7, 2], [4, 3, 8, 6]]), None)
"""Rows (user, first event, end, first scored event); user 4 has two chunks."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return folder


@pytest.fixture(scope="module")
def featured(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Dataset.open(write_featured_log(tmp_path_factory.mktemp("featured")))


def events_of(dataset: Dataset, user: int, column: str = "item_ids") -> np.ndarray:
    values, offsets = dataset.rows(np.arange(dataset.num_samples)).lists[column]
    return values[offsets[user] : offsets[user + 1]]


def collate(collator: Collator, samples: list[int], epoch: int = 0) -> MicroBatch:
    chosen = np.array(samples, np.int64)
    return collator.collate(chosen, collator.read(chosen), epoch)


def check_keys(collator: Collator, names: tuple[str, ...], samples: list[int]) -> None:
    """Checks that `sample_keys`, which clustering uses, returns the keys that each sample looks up."""
    chosen = np.array(samples, np.int64)
    keys, offsets = collator.sample_keys(chosen, collator.read(chosen), 1)  # type: ignore[misc]
    assert len(offsets) == len(samples) + 1
    for i, sample in enumerate(samples):
        alone = collate(collator, [sample], 1)
        looked_up = {key for name in names for key in alone.keys[name].reshape(-1).tolist()}
        assert set(keys[offsets[i] : offsets[i + 1]].tolist()) == looked_up


@pytest.mark.parametrize("family", FAMILIES)
def test_sample_keys_equal_the_keys_looked_up(data: Path, family: str) -> None:
    cfg = config_of(family, data)
    task = make_task(cfg.task, Dataset.open(Path(cfg.data.folder)), seed=1, dtype="float32")
    names = {"ranking": ("item",), "rows": ("category",)}.get(family, ("history", "positive"))
    check_keys(task.collator, names, [3, 0, 7])


@pytest.mark.parametrize("family", FAMILIES)
def test_collator_tokens_and_weights_sum_over_samples(data: Path, family: str) -> None:
    cfg = config_of(family, data)
    collator = make_task(cfg.task, Dataset.open(Path(cfg.data.folder)), seed=1, dtype="float32").collator
    samples = np.arange(len(collator.tokens))
    alone = [collate(collator, [sample]) for sample in samples.tolist()]
    per_target = 2 if family == "ranking" else 1
    tokens = [batch.num_tokens for batch in alone]
    assert collator.tokens.tolist() == collator.tokens_in(samples, 1).tolist() == tokens
    assert collator.weights.tolist() == [count / per_target for count in tokens]
    assert collator.weight(samples, 1) == sum(tokens) / per_target
    combined = collate(collator, samples.tolist())
    assert combined.num_tokens == sum(tokens)
    assert combined.max_length == max(batch.max_length for batch in alone)
    assert np.array_equal(combined.sample_ids, np.concatenate([batch.sample_ids for batch in alone]))
    for name, keys in combined.keys.items():
        if name != "catalog":
            assert np.array_equal(keys, np.concatenate([batch.keys[name] for batch in alone]))
    empty = collate(collator, [])  # a rank may have no sample
    assert (empty.num_tokens, len(empty.sample_ids)) == (0, 0)
    assert set(empty.tensors) == set(combined.tensors)
    for name, tensor in combined.tensors.items():
        assert empty.tensors[name].dtype == tensor.dtype
        if "offsets" not in name:
            assert torch.equal(tensor.nan_to_num(), torch.cat([batch.tensors[name] for batch in alone]).nan_to_num())


@pytest.mark.parametrize("family", FAMILIES)
def test_shuffle_of_large_datasets_uses_blocks(data: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setattr("nestrec.data.dataset.FULL_SHUFFLE_BYTES", 0)
    monkeypatch.setattr("nestrec.data.dataset.SHUFFLE_BLOCK_BYTES", 1 << 10)
    cfg = config_of(family, data)
    collator = make_task(cfg.task, Dataset.open(Path(cfg.data.folder)), seed=1, dtype="float32").collator
    assert collator.shuffle_block is not None
    assert 1 <= collator.shuffle_block < len(collator.tokens)


def test_chunk_collators_hold_their_events_and_score_the_last(data: Path) -> None:
    dataset = Dataset.open(data / "sequences")
    inputs = RankingInputs(dataset, RankingInputConfig(labels=("click",)), seed=0)
    ranking = RankingChunkCollator(inputs, CHUNKS, seed=3)
    retrieval = RetrievalChunkCollator(dataset, CHUNKS, HistoryConfig(), seed=3, sampler=None, use_times=True)
    for collator, names in ((ranking, ("item",)), (retrieval, ("history", "positive"))):
        check_keys(collator, names, [0, 1])
        assert collator.scored_users.tolist() == [4, 4, 4, 1, 1, 1, 1, 1, 4, 4]
        assert collator.weights.tolist() == [3, 5, 2]
        batch = collate(collator, [0, 1, 2])
        assert batch.tensors["token_key"].unique().numel() == batch.num_tokens == batch.tensors["offsets"][-1]
        again = collate(collator, [2])
        assert torch.equal(batch.tensors["token_key"][-again.num_tokens :], again.tensors["token_key"])
        assert batch.sample_ids.tolist() == [4, 1, 4]
    runs = [events_of(dataset, 4)[0:5], events_of(dataset, 1)[2:7], events_of(dataset, 4)[3:8]]
    batch = collate(ranking, [0, 1, 2])
    assert batch.keys["item"].tolist() == np.concatenate(runs).tolist()
    assert batch.tensors["scored"].tolist() == [False] * 2 + [True] * 8 + [False] * 3 + [True] * 2
    assert ranking.tokens.tolist() == [10, 10, 10]
    batch = collate(retrieval, [0, 1, 2])
    assert batch.keys["history"].tolist() == np.concatenate([run[:-1] for run in runs]).tolist()
    assert batch.tensors["scored"].tolist() == [1, 2, 3, 4, 5, 6, 7, 10, 11]
    assert batch.tensors["target"].tolist() == [*runs[0][2:], *runs[1][1:], *runs[2][3:]]
    assert batch.max_length == 4
    assert retrieval.tokens.tolist() == [4, 4, 4]
    before = retrieval.items_before_targets(np.array([0, 2]), retrieval.read(np.array([0, 2])), of_input=False)
    items = events_of(dataset, 4)
    expected = [items[:end].tolist() for end in (2, 3, 4, 6, 7)]
    assert [row.tolist() for row in before.rows()] == expected
    before = retrieval.items_before_targets(np.array([0, 2]), retrieval.read(np.array([0, 2])), of_input=True)
    assert [row.tolist() for row in before.rows()] == [*expected[:3], expected[3][3:], expected[4][3:]]


def test_chunk_collator_draws_negatives_for_scored_tokens_only(data: Path) -> None:
    dataset = Dataset.open(data / "sequences")
    counts = np.arange(1, dataset.num_items + 1)
    sampler = PopularitySampler(counts, 3, power=1.0, log_q=True)
    collator = RetrievalChunkCollator(
        dataset, CHUNKS, HistoryConfig(), seed=3, sampler=sampler, logit_sharing=2, use_times=False
    )
    batch = collate(collator, [0, 1, 2])
    scored = batch.tensors["scored"]
    expected = sampler.draw(batch.tensors["token_key"][scored].numpy().view(np.uint64), batch.tensors["target"].numpy())
    assert np.array_equal(batch.keys["negative"], expected.keys["negative"])
    assert torch.equal(batch.tensors["negative_bias"], expected.tensors["negative_bias"])
    assert batch.tensors["shared_token"].shape == (len(scored), 1)
    assert np.array_equal(batch.keys["positive"], batch.tensors["target"].numpy())
    without = RetrievalChunkCollator(dataset, CHUNKS, HistoryConfig(), seed=3, sampler=None, use_times=False)
    assert collate(without, [0]).keys["catalog"].tolist() == list(range(1, dataset.num_items + 1))


def test_stochastic_length_collates_only_sampled_events(data: Path) -> None:
    dataset = Dataset.open(data / "sequences")
    split = split_leave_one_out(dataset.lengths)
    history = HistoryConfig(max_events=20, stochastic_length_alpha=1.2)
    collator = RetrievalCollator(dataset, split, history, seed=5, sampler=None, use_times=True)
    users = np.flatnonzero(split.train_end >= 2)
    num_cut = 0
    for epoch in (0, 1):
        batch = collate(collator, list(range(len(users))), epoch)
        offsets = batch.tensors["offsets"].tolist()
        token_counts = []
        for sample, user in enumerate(users.tolist()):
            end = split.train_end[[user]]
            key = sample_keys(5, epoch, np.array([user]))
            count = min(int(stochastic_length(end, key, alpha=1.2, longest=20)[0]), 21)
            events = sample_events(int(end[0]), count, int(key[0]))
            items, times = events_of(dataset, user), events_of(dataset, user, "timestamps_ms")
            span = slice(offsets[sample], offsets[sample + 1])
            assert batch.keys["history"][span].tolist() == items[events[:-1]].tolist()
            assert batch.tensors["target"][span].tolist() == items[events[1:]].tolist()
            assert batch.tensors["query_time"][span].tolist() == (times[events[1:]] / 1000).tolist()
            num_cut += count < end[0]
            token_counts.append(count - 1)
        assert collator.tokens_in(np.arange(len(users)), epoch).tolist() == token_counts
        assert collator.weight(np.arange(len(users)), epoch) == sum(token_counts)
    assert num_cut > 10
    check_keys(collator, ("history", "positive"), [2, 0, 5])


def test_stochastic_length_draws_differ_between_samples() -> None:
    drawn = {tuple(sample_events(50, 10, fold(key)).tolist()) for key in range(20)}
    assert len(drawn) == 20
    assert stochastic_length(np.array([5]), np.array([0], np.uint64), alpha=1.01, longest=2).tolist() == [2]


def test_user_features_are_repeated_at_each_event(featured: Dataset) -> None:
    features_by_name = {
        f.name: f for f in featured.card.user_features if f.name in (*USER_FEATURES, *USER_VECTOR_FEATURES)
    }
    features = EventFeatures(featured, list(features_by_name.values()))
    users, events = np.array([5, 2, 11]), np.array([2, 0, 3])
    inputs = features.lookup(featured.rows(users), np.zeros(5, np.int64), events)
    rows = featured.rows(users)
    of_event = np.repeat(np.arange(3), events)
    assert inputs.keys["user_country"].tolist() == rows.scalars["user_country"][of_event].tolist()
    numbers = features_by_name["age"].transform.numbers(rows.scalars["user_age"])[of_event]
    assert np.array_equal(inputs.tensors["user_age"].numpy()[:, 0], numbers)
    tastes = np.asarray(featured.vectors(features_by_name["taste"]))[users[of_event]]
    assert np.array_equal(inputs.tensors["user_taste"].numpy(), tastes)
    values, offsets = rows.lists["user_languages"]
    spoken = [language for i in of_event for language in values[offsets[i] : offsets[i + 1]].tolist()]
    assert inputs.keys["user_languages"].tolist() == spoken


def test_user_features_are_prefix_tokens_only_in_prefix_mode(featured: Dataset) -> None:
    of_users = [feature for feature in featured.card.user_features if feature.name in USER_FEATURES]
    assert prefix_columns("prefix", of_users) == tuple(feature.column for feature in of_users)
    assert len(of_users) == 3
    assert prefix_columns("summed", of_users) == prefix_columns("summed", []) == ()
    with pytest.raises(UserError, match=r"task.inputs.user_feature_mode=prefix"):
        prefix_columns("prefix", [])
