"""Synthetic logs are pure functions of the seed, have the documented shape, and contain learnable patterns."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestrec.base.errors import UserError
from nestrec.data.dataset import Dataset
from nestrec.data.formats.format_registry import prepare
from nestrec.data.formats.log_format import LogOptions
from nestrec.data.prepare.prepare_options import LogColumns
from nestrec.data.synthetic import synthetic_logs as synthetic
from nestrec.data.synthetic.synthetic_walk import permute, successor

TINY = synthetic.preset("tiny")


def sequences(shape: synthetic.SyntheticConfig) -> list[np.ndarray]:
    block = synthetic.draw_events(shape, 0, shape.num_users)
    return np.split(block.item_ids, np.cumsum(block.lengths)[:-1])


def ranks_of_ids(shape: synthetic.SyntheticConfig) -> np.ndarray:
    ranks = np.arange(shape.num_items)
    rank_of_id = np.empty(shape.num_items + 1, dtype=np.int64)
    rank_of_id[synthetic._item_ids(ranks, shape.num_items, synthetic._catalog_key(shape))] = ranks
    return rank_of_id


def ndcg_at_10(scores: np.ndarray, target: int) -> float:
    rank = int((scores > scores[target]).sum())
    return 1.0 / np.log2(rank + 2) if rank < 10 else 0.0


def test_synthetic_log_bytes_depend_only_on_the_seed(tmp_path: Path) -> None:
    first, second, other = (
        prepare("synthetic", "tiny", tmp_path / name, num_users=200, seed=seed).files
        for name, seed in (("a", 4), ("b", 4), ("c", 5))
    )
    assert first == second
    assert {f.sha256 for f in first}.isdisjoint(f.sha256 for f in other)


@given(user=st.integers(0, 1999), size=st.integers(1, 50))
def test_synthetic_users_can_be_drawn_in_any_block(user: int, size: int) -> None:
    alone = synthetic.draw_events(TINY, user, user + 1)
    start = max(0, user - size)
    block = synthetic.draw_events(TINY, start, user + size)
    offset = int(block.lengths[: user - start].sum())
    part = slice(offset, offset + int(alone.lengths[0]))
    for name in ("item_ids", "times_ms", "actions"):
        assert np.array_equal(getattr(block, name)[part], getattr(alone, name))


def test_synthetic_previous_item_predicts_better_than_popularity() -> None:
    rows = sequences(TINY)
    popularity = np.zeros(TINY.num_items + 1)
    follows = np.zeros((TINY.num_items + 1, TINY.num_items + 1))
    for row in rows:
        np.add.at(popularity, row[:-1], 1)
        np.add.at(follows, (row[:-2], row[1:-1]), 1)
    by_popularity = np.mean([ndcg_at_10(popularity, row[-1]) for row in rows])
    by_last_item = np.mean([ndcg_at_10(follows[row[-2]] + 1e-6 * popularity, row[-1]) for row in rows])
    assert by_last_item > 8 * by_popularity
    assert by_last_item > 0.4


def test_synthetic_history_predicts_better_than_the_last_item() -> None:
    """Each user prefers one of the two cycles through an item, and the history reveals which one."""
    rank_of_id = ranks_of_ids(TINY)
    key = synthetic._catalog_key(TINY)
    agreements = []
    for row in sequences(TINY)[:500]:
        ranks = rank_of_id[row]
        used = [
            [successor(int(a), dialect, TINY.num_items, TINY.num_topics, key) == b for dialect in (0, 1)]
            for a, b in itertools.pairwise(ranks)
        ]
        dialects = [int(second) for first, second in used if first != second]
        if len(dialects) > 5:
            agreements.append(dialects[-1] == (np.mean(dialects[:-1]) > 0.5))
    assert np.mean(agreements) > 0.75


def test_synthetic_tiny_has_expected_size_and_no_repeats() -> None:
    rows = sequences(TINY)
    assert len(rows) == 2000
    assert 500 <= TINY.num_items <= 1000
    assert 25 < np.mean([row.size for row in rows]) < 35
    repeats = sum(row.size - np.unique(row).size for row in rows)
    assert repeats < 0.001 * sum(row.size for row in rows)


@pytest.mark.parametrize(
    ("name", "mu", "sigma", "low", "high"),
    [
        ("kuairand-27k-like", 9.06, 0.80, 100, 228_000),
        ("turbogr-kuai", 6.0, 1.5, 5, 2048),
        ("freescale", 7.5, 1.2, 5, 21_000),
        ("ml-1m-like", 4.44, 0.98, 16, 1924),
    ],
)
def test_synthetic_lengths_follow_published_distribution(
    name: str, mu: float, sigma: float, low: int, high: int
) -> None:
    lengths = synthetic.lengths(name, 40_000, seed=2)
    assert low <= lengths.min()
    assert lengths.max() <= high
    inside = np.log(lengths[(lengths > low) & (lengths < high)])
    generator = np.random.default_rng(0)
    drawn = np.rint(np.exp(generator.normal(mu, sigma, 400_000)))
    expected = np.log(drawn[(drawn > low) & (drawn < high)])
    assert abs(inside.mean() - expected.mean()) < 0.02
    assert abs(inside.std() - expected.std()) < 0.02
    assert np.array_equal(lengths[:100], synthetic.lengths(name, 100, seed=2))


def test_synthetic_lengths_equal_those_of_the_events() -> None:
    shape = synthetic.preset("turbogr-kuai", num_users=50, seed=9)
    assert np.array_equal(synthetic.draw_events(shape, 0, 50).lengths, synthetic.lengths("turbogr-kuai", 50, seed=9))


def test_synthetic_popularity_has_fitted_zipf_exponent(tmp_path: Path) -> None:
    card = synthetic.generate(synthetic.preset("turbogr-kuai", num_users=1500), tmp_path / "out")
    assert 0.55 < card.popularity.zipf_s < 0.85
    assert 0.4 < card.popularity.top_10_percent_share < 0.65


def test_synthetic_actions_are_likelier_on_favorite_topics() -> None:
    """Users like few topics, and click more on their most frequent topic."""
    shape = dataclasses.replace(TINY, follow_chance=0.0, num_users=1000)
    block = synthetic.draw_events(shape, 0, 1000)
    topics = ranks_of_ids(shape)[block.item_ids] % shape.num_topics
    users = np.repeat(np.arange(1000), block.lengths)
    seen = np.zeros((1000, shape.num_topics))
    np.add.at(seen, (users, topics), 1)
    is_favorite = topics == seen.argmax(axis=1)[users]
    clicked = block.actions & synthetic.ACTION_BITS["click"] != 0
    assert clicked[is_favorite].mean() > clicked[~is_favorite].mean() + 0.1
    for name in ("like", "long_view"):
        assert not (block.actions[~clicked] & synthetic.ACTION_BITS[name]).any()


def test_synthetic_times_never_decrease_and_sometimes_tie() -> None:
    block = synthetic.draw_events(TINY, 0, 500)
    is_inside = np.diff(np.repeat(np.arange(500), block.lengths)) == 0
    gaps = np.diff(block.times_ms)[is_inside]
    assert gaps.min() == 0
    assert 0.02 < (gaps == 0).mean() < 0.1


def test_synthetic_csv_prepared_equals_direct_dataset(tmp_path: Path) -> None:
    shape = synthetic.preset("tiny", num_users=300, seed=1)
    synthetic.generate(shape, tmp_path / "direct")
    assert synthetic.write_csv(shape, tmp_path / "log.csv") == int(synthetic.lengths(shape, 300, 1).sum())
    log = LogColumns(time="time_ms", time_unit="ms", actions={name: name for name in synthetic.ACTION_BITS})
    prepare("log", tmp_path / "log.csv", tmp_path / "prepared", options=LogOptions(log=log))
    direct, prepared = Dataset.open(tmp_path / "direct"), Dataset.open(tmp_path / "prepared")
    order = np.argsort([int(key) for key in prepared.user_keys(np.arange(300))])
    prepared_rows = prepared.rows(order)
    direct_rows = direct.rows(np.arange(300))
    keys = np.array([0, *map(int, prepared.items().column("item_key").to_pylist())])
    assert np.array_equal(keys[prepared_rows.lists["item_ids"][0]], direct_rows.lists["item_ids"][0])
    assert np.array_equal(prepared_rows.lists["timestamps_ms"][0], direct_rows.lists["timestamps_ms"][0])
    for name, bit in synthetic.ACTION_BITS.items():
        own_bit = prepared.card.action_bits[name]
        assert np.array_equal(
            prepared_rows.lists["actions"][0] & own_bit != 0, direct_rows.lists["actions"][0] & bit != 0
        )


@given(size=st.integers(1, 300), key=st.integers(0, 2**64 - 1))
def test_synthetic_permute_is_a_bijection(size: int, key: int) -> None:
    assert sorted(int(permute(i, size, np.uint64(key))) for i in range(size)) == list(range(size))


@given(
    num_items=st.integers(1, 200),
    num_topics=st.integers(1, 7),
    key=st.integers(0, 2**64 - 1),
    dialect=st.integers(0, 1),
)
def test_synthetic_successors_are_a_bijection_inside_topics(
    num_items: int, num_topics: int, key: int, dialect: int
) -> None:
    shape = (dialect, num_items, num_topics, np.uint64(key))
    after = [int(successor(rank, *shape)) for rank in range(num_items)]
    assert sorted(after) == list(range(num_items))
    assert all(a % num_topics == rank % num_topics for rank, a in enumerate(after))


def test_synthetic_mistyped_preset_gets_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"(?i)did you mean 'tiny'"):
        prepare("synthetic", "tinny", tmp_path / "out")


@pytest.mark.parametrize("change", [{"num_users": 0}, {"zipf_s": 1.0}, {"num_topics": 10_000}])
def test_synthetic_impossible_shapes_are_rejected(tmp_path: Path, change: dict[str, float]) -> None:
    with pytest.raises(UserError):
        synthetic.generate(dataclasses.replace(TINY, **change), tmp_path / "out")


def test_synthetic_interests_resume_at_their_last_item() -> None:
    """The next item follows the last one of the same interest, which need not be the last item of the user."""
    shape = dataclasses.replace(synthetic.preset("interests"), num_users=50, follow_chance=1.0, switch_chance=1.0)
    block = synthetic.draw_events(shape, 0, 50)
    followers: dict[int, set[int]] = {}
    ends = np.cumsum(block.lengths)
    for start, end in zip(ends - block.lengths, ends, strict=True):
        items = block.item_ids[start:end]
        for item, following in zip(items[:-2], items[2:], strict=True):
            followers.setdefault(int(item), set()).add(int(following))
    fraction = np.mean([len(items_after) <= 2 for items_after in followers.values()])  # each item is in two cycles
    assert fraction > 0.8
