"""Samples of every task against plain loops: which events they hold, and which keys they look up."""

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
from nestrec.data.samples.feature_inputs import EventFeatures, prefix_of
from nestrec.data.samples.negative_sampling import PopularitySampler
from nestrec.data.samples.ranking_collator import RankingInputConfig, RankingInputs
from nestrec.data.samples.retrieval_collator import HistoryConfig, RetrievalCollator
from nestrec.data.samples.split import kept_events, kept_length, leave_one_out
from nestrec.data.samples.time_windows import TrainingChunks
from nestrec.tasks.task_registry import make_task
from support.featured_log import MORE_OF_USERS, USER_FEATURES, write_featured_log
from support.tiny_runs import FAMILIES, config_of, make_datasets

SLICES = TrainingChunks(np.array([[4, 0, 5, 2], [1, 2, 7, 2], [4, 3, 8, 6]]), None)
"""Rows (user, first event, end, first scored event); user 4 comes twice."""


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


def assembled(assembler: Collator, samples: list[int], epoch: int = 0) -> MicroBatch:
    chosen = np.array(samples, np.int64)
    return assembler.assemble(chosen, assembler.read(chosen), epoch)


def check_keys(assembler: Collator, names: tuple[str, ...], samples: list[int]) -> None:
    """Clustering receives the keys that each sample looks up."""
    chosen = np.array(samples, np.int64)
    keys, offsets = assembler.sample_keys(chosen, assembler.read(chosen), 1)  # type: ignore[misc]
    assert len(offsets) == len(samples) + 1
    for i, sample in enumerate(samples):
        alone = assembled(assembler, [sample], 1)
        looked_up = {key for name in names for key in alone.keys[name].reshape(-1).tolist()}
        assert set(keys[offsets[i] : offsets[i + 1]].tolist()) == looked_up


@pytest.mark.parametrize("family", FAMILIES)
def test_sample_keys_are_those_that_samples_look_up(data: Path, family: str) -> None:
    cfg = config_of(family, data)
    task = make_task(cfg.task, Dataset.open(Path(cfg.data.folder)), seed=1, dtype="float32")
    names = {"ranking": ("item",), "rows": ("category",)}.get(family, ("history", "positive"))
    check_keys(task.assembler, names, [3, 0, 7])


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_weights_are_those_of_the_samples(data: Path, family: str) -> None:
    cfg = config_of(family, data)
    assembler = make_task(cfg.task, Dataset.open(Path(cfg.data.folder)), seed=1, dtype="float32").assembler
    samples = np.arange(len(assembler.tokens))
    alone = [assembled(assembler, [sample]) for sample in samples.tolist()]
    per_target = 2 if family == "ranking" else 1
    tokens = [batch.num_tokens for batch in alone]
    assert assembler.tokens.tolist() == assembler.tokens_in(samples, 1).tolist() == tokens
    assert assembler.weights.tolist() == [count / per_target for count in tokens]
    assert assembler.weight(samples, 1) == sum(tokens) / per_target
    every = assembled(assembler, samples.tolist())
    assert every.num_tokens == sum(tokens)
    assert every.max_length == max(batch.max_length for batch in alone)
    assert np.array_equal(every.sample_ids, np.concatenate([batch.sample_ids for batch in alone]))
    for name, keys in every.keys.items():
        if name != "catalogue":
            assert np.array_equal(keys, np.concatenate([batch.keys[name] for batch in alone]))
    nothing = assembled(assembler, [])  # the part of a rank that has no sample
    assert (nothing.num_tokens, len(nothing.sample_ids)) == (0, 0)
    assert set(nothing.tensors) == set(every.tensors)
    for name, tensor in every.tensors.items():
        assert nothing.tensors[name].dtype == tensor.dtype
        if "offsets" not in name:
            assert torch.equal(tensor.nan_to_num(), torch.cat([batch.tensors[name] for batch in alone]).nan_to_num())


@pytest.mark.parametrize("family", FAMILIES)
def test_large_datasets_are_shuffled_in_blocks(data: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setattr("nestrec.data.dataset.SHUFFLED_WHOLE_BYTES", 0)
    monkeypatch.setattr("nestrec.data.dataset.BLOCK_BYTES", 1 << 10)
    cfg = config_of(family, data)
    assembler = make_task(cfg.task, Dataset.open(Path(cfg.data.folder)), seed=1, dtype="float32").assembler
    assert assembler.shuffle_block is not None
    assert 1 <= assembler.shuffle_block < len(assembler.tokens)


def test_slices_hold_their_events_and_score_the_last(data: Path) -> None:
    dataset = Dataset.open(data / "sequences")
    inputs = RankingInputs(dataset, RankingInputConfig(labels=("click",), max_events=8), seed=0)
    ranking = RankingChunkCollator(inputs, SLICES, seed=3)
    retrieval = RetrievalChunkCollator(dataset, SLICES, HistoryConfig(), seed=3, sampler=None, use_times=True)
    for slices, names in ((ranking, ("item",)), (retrieval, ("history", "positive"))):
        check_keys(slices, names, [0, 1])
        assert slices.scored_users.tolist() == [4, 4, 4, 1, 1, 1, 1, 1, 4, 4]
        assert slices.weights.tolist() == [3, 5, 2]
        batch = assembled(slices, [0, 1, 2])
        assert batch.tensors["token_key"].unique().numel() == batch.num_tokens == batch.tensors["offsets"][-1]
        again = assembled(slices, [2])
        assert torch.equal(batch.tensors["token_key"][-again.num_tokens :], again.tensors["token_key"])
        assert batch.sample_ids.tolist() == [4, 1, 4]
    runs = [events_of(dataset, 4)[0:5], events_of(dataset, 1)[2:7], events_of(dataset, 4)[3:8]]
    batch = assembled(ranking, [0, 1, 2])
    assert batch.keys["item"].tolist() == np.concatenate(runs).tolist()
    assert batch.tensors["scored"].tolist() == [False] * 2 + [True] * 8 + [False] * 3 + [True] * 2
    assert ranking.tokens.tolist() == [10, 10, 10]
    batch = assembled(retrieval, [0, 1, 2])
    assert batch.keys["history"].tolist() == np.concatenate([run[:-1] for run in runs]).tolist()
    assert batch.tensors["scored"].tolist() == [1, 2, 3, 4, 5, 6, 7, 10, 11]
    assert batch.tensors["target"].tolist() == [*runs[0][2:], *runs[1][1:], *runs[2][3:]]
    assert batch.max_length == 4
    assert retrieval.tokens.tolist() == [4, 4, 4]
    before = retrieval.before_targets(np.array([0, 2]), retrieval.read(np.array([0, 2])), of_input=False)
    items = events_of(dataset, 4)
    expected = [items[:end].tolist() for end in (2, 3, 4, 6, 7)]
    assert [row.tolist() for row in before.rows()] == expected
    before = retrieval.before_targets(np.array([0, 2]), retrieval.read(np.array([0, 2])), of_input=True)
    assert [row.tolist() for row in before.rows()] == [*expected[:3], expected[3][3:], expected[4][3:]]


def test_slices_draw_negatives_for_scored_tokens_alone(data: Path) -> None:
    dataset = Dataset.open(data / "sequences")
    counts = np.arange(1, dataset.num_items + 1)
    sampler = PopularitySampler(counts, 3, power=1.0, log_q=True)
    slices = RetrievalChunkCollator(
        dataset, SLICES, HistoryConfig(), seed=3, sampler=sampler, sharing=2, use_times=False
    )
    batch = assembled(slices, [0, 1, 2])
    scored = batch.tensors["scored"]
    expected = sampler.draw(batch.tensors["token_key"][scored].numpy().view(np.uint64), batch.tensors["target"].numpy())
    assert np.array_equal(batch.keys["negative"], expected.keys["negative"])
    assert torch.equal(batch.tensors["negative_bias"], expected.tensors["negative_bias"])
    assert batch.tensors["shared_token"].shape == (len(scored), 1)
    assert np.array_equal(batch.keys["positive"], batch.tensors["target"].numpy())
    without = RetrievalChunkCollator(dataset, SLICES, HistoryConfig(), seed=3, sampler=None, use_times=False)
    assert assembled(without, [0]).keys["catalogue"].tolist() == list(range(1, dataset.num_items + 1))


def test_stochastic_length_reads_the_kept_events(data: Path) -> None:
    dataset = Dataset.open(data / "sequences")
    split = leave_one_out(dataset.lengths)
    history = HistoryConfig(max_length=20, stochastic_length_alpha=1.2)
    assembler = RetrievalCollator(dataset, split, history, seed=5, sampler=None, use_times=True)
    users = np.flatnonzero(split.train_end >= 2)
    num_cut = 0
    for epoch in (0, 1):
        batch = assembled(assembler, list(range(len(users))), epoch)
        offsets = batch.tensors["offsets"].tolist()
        kept = []
        for sample, user in enumerate(users.tolist()):
            end = split.train_end[[user]]
            key = sample_keys(5, epoch, np.array([user]))
            count = min(int(kept_length(end, key, alpha=1.2, longest=20)[0]), 21)
            events = kept_events(int(end[0]), count, int(key[0]))
            items, times = events_of(dataset, user), events_of(dataset, user, "timestamps_ms")
            mine = slice(offsets[sample], offsets[sample + 1])
            assert batch.keys["history"][mine].tolist() == items[events[:-1]].tolist()
            assert batch.tensors["target"][mine].tolist() == items[events[1:]].tolist()
            assert batch.tensors["query_time"][mine].tolist() == (times[events[1:]] / 1000).tolist()
            num_cut += count < end[0]
            kept.append(count - 1)
        assert assembler.tokens_in(np.arange(len(users)), epoch).tolist() == kept
        assert assembler.weight(np.arange(len(users)), epoch) == sum(kept)
    assert num_cut > 10
    check_keys(assembler, ("history", "positive"), [2, 0, 5])


def test_kept_events_are_drawn_anew_for_each_sample() -> None:
    drawn = {tuple(kept_events(50, 10, fold(key)).tolist()) for key in range(20)}
    assert len(drawn) == 20
    assert kept_length(np.array([5]), np.array([0], np.uint64), alpha=1.01, longest=2).tolist() == [2]


def test_features_of_a_user_are_at_each_of_its_events(featured: Dataset) -> None:
    wanted = {f.name: f for f in featured.card.user_features if f.name in (*USER_FEATURES, *MORE_OF_USERS)}
    features = EventFeatures(featured, list(wanted.values()))
    users, events = np.array([5, 2, 11]), np.array([2, 0, 3])
    found = features.of(featured.rows(users), np.zeros(5, np.int64), events)
    rows = featured.rows(users)
    of_event = np.repeat(np.arange(3), events)
    assert found.keys["user_country"].tolist() == rows.scalars["user_country"][of_event].tolist()
    numbers = wanted["age"].transform.numbers(rows.scalars["user_age"])[of_event]
    assert np.array_equal(found.tensors["user_age"].numpy()[:, 0], numbers)
    tastes = np.asarray(featured.vectors(wanted["taste"]))[users[of_event]]
    assert np.array_equal(found.tensors["user_taste"].numpy(), tastes)
    values, offsets = rows.lists["user_languages"]
    spoken = [language for i in of_event for language in values[offsets[i] : offsets[i + 1]].tolist()]
    assert found.keys["user_languages"].tolist() == spoken


def test_features_of_users_are_prefix_tokens_only_if_asked(featured: Dataset) -> None:
    of_users = [feature for feature in featured.card.user_features if feature.name in USER_FEATURES]
    assert prefix_of("prefix", of_users) == tuple(feature.column for feature in of_users)
    assert len(of_users) == 3
    assert prefix_of("summed", of_users) == prefix_of("summed", []) == ()
    with pytest.raises(UserError, match=r"task.inputs.user_tokens = 'prefix'"):
        prefix_of("prefix", [])
