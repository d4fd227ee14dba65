import numpy as np
import pytest
import torch

from nestrec.tasks import baselines
from nestrec.tasks.baselines import (
    EASE_PENALTY,
    SHRINKAGE,
    EASEBaseline,
    ItemKNNBaseline,
    LastItem,
    Popularity,
    recent_popularity,
    take_allowed,
)

# Three users: 1 2 3 | 2 3 | 3 1 2
ITEMS = np.array([1, 2, 3, 2, 3, 3, 1, 2])
OFFSETS = np.array([0, 3, 5, 8])


def test_popularity_baseline_counts_events_and_breaks_ties_by_id() -> None:
    popularity = Popularity(ITEMS, num_items=5)
    assert popularity.top(np.array([1]), set(), 5) == [2, 3, 1, 4, 5]
    assert popularity.top(np.array([1]), {2, 4}, 2) == [3, 1]
    assert popularity.top(np.array([1]), {1, 2, 3, 4, 5}, 3) == []


def test_last_item_baseline_ranks_followers_then_popularity() -> None:
    system = LastItem(ITEMS, OFFSETS, Popularity(ITEMS, num_items=5))
    # Item 2 is followed by 3 twice; successions across the boundaries of users do not count.
    assert system.top(np.array([2]), set(), 3) == [3, 2, 1]
    assert system.top(np.array([1]), set(), 2) == [2, 3]
    assert system.top(np.array([3]), set(), 2) == [1, 2]
    assert system.top(np.array([3]), {1}, 2) == [2, 3]


def test_last_item_baseline_falls_back_to_popularity() -> None:
    system = LastItem(ITEMS, OFFSETS, Popularity(ITEMS, num_items=5))
    assert system.top(np.array([5]), set(), 3) == [2, 3, 1]
    assert system.top(np.array([4]), {2}, 3) == [3, 1, 4]


def test_last_item_baseline_handles_users_without_events() -> None:
    system = LastItem(np.array([1, 2, 1, 3]), np.array([0, 0, 2, 2, 4]), Popularity(np.array([1, 2, 1, 3]), 3))
    assert system.top(np.array([1]), set(), 2) == [2, 3]
    assert system.top(np.array([2]), set(), 1) == [1]  # ranked by popularity, because no item follows it within a user


def test_take_allowed_searches_past_excluded_items() -> None:
    assert take_allowed(np.arange(10), set(range(8)), 2) == [8, 9]


def test_item_knn_baseline_equals_reference_implementation() -> None:
    draw = np.random.default_rng(0)
    users = [draw.integers(1, 9, draw.integers(1, 6)) for _ in range(12)]
    items, offsets = np.concatenate(users), np.concatenate([[0], np.cumsum([len(u) for u in users])])
    popularity = Popularity(items, 9)
    system = ItemKNNBaseline(items, offsets, 9, popularity)
    sets = {i: {u for u, own in enumerate(users) if i in own} for i in range(1, 10)}
    for history in ([1], [2, 5], [9, 3, 3]):
        score = {
            i: sum(
                len(sets[i] & sets[j]) / (np.sqrt(len(sets[i]) * len(sets[j])) + SHRINKAGE)
                for j in set(history)
                if i != j and sets[i] & sets[j]
            )
            for i in range(1, 10)
            if i not in history
        }
        expected = sorted((i for i in score if score[i] > 0), key=lambda i: (-round(score[i], 12), i))
        ranked = system.top(np.array(history), set(history), 9)
        assert ranked[: len(expected)] == expected
        assert set(ranked) == set(range(1, 10)) - set(history), "the remaining items are ranked by popularity"


def test_ease_baseline_equals_closed_form() -> None:
    """The weights of an item are the ridge regression of its column on the columns of all other items."""
    draw = np.random.default_rng(1)
    table = (draw.random((40, 7)) < 0.4).astype(np.float64)
    items = np.concatenate([1 + np.flatnonzero(row) for row in table])
    offsets = np.concatenate([[0], np.cumsum(table.sum(1).astype(np.int64))])
    system = EASEBaseline(items, offsets, 7, torch.device("cpu"))
    weight = np.zeros((7, 7))
    for i in range(7):
        others = [j for j in range(7) if j != i]
        gram = table[:, others].T @ table[:, others] + EASE_PENALTY * np.eye(6)
        weight[others, i] = np.linalg.solve(gram, table[:, others].T @ table[:, i])
    assert system._weight == pytest.approx(weight, abs=1e-5)
    score = weight[[0, 3]].sum(0)
    assert system.top(np.array([1, 4, 4]), {1, 4}, 3) == [i + 1 for i in np.argsort(-score) if i not in (0, 3)][:3]


def test_recent_popularity_baseline_counts_the_last_tenth() -> None:
    items = np.array([1] * 15 + [2] * 3 + [3, 3])
    times = np.arange(20)
    assert recent_popularity(items, times, 3).top(np.array([1]), set(), 3) == [3, 1, 2]


def test_item_pairs_of_long_histories_use_their_last_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "MAX_PAIRED_EVENTS", 2)
    items, offsets = baselines.distinct_items(np.array([1, 2, 3, 4, 4]), np.array([0, 3, 5]))
    assert (items.tolist(), offsets.tolist()) == ([2, 3, 4], [0, 2, 3])
