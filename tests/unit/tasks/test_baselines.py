import numpy as np

from nestrec.tasks.baselines import LastItem, Popularity, take_allowed

# Three users: 1 2 3 | 2 3 | 3 1 2
ITEMS = np.array([1, 2, 3, 2, 3, 3, 1, 2])
OFFSETS = np.array([0, 3, 5, 8])


def test_popularity_counts_events_and_breaks_ties_by_id() -> None:
    popularity = Popularity(ITEMS, num_items=5)
    assert popularity.top(1, set(), 5) == [2, 3, 1, 4, 5]
    assert popularity.top(1, {2, 4}, 2) == [3, 1]
    assert popularity.top(1, {1, 2, 3, 4, 5}, 3) == []


def test_last_item_ranks_followers_within_a_user_then_by_popularity() -> None:
    system = LastItem(ITEMS, OFFSETS, Popularity(ITEMS, num_items=5))
    # 2 is followed by 3 twice; 3 then 2 and 2 then 3 across the borders of users do not count.
    assert system.top(2, set(), 3) == [3, 2, 1]
    assert system.top(1, set(), 2) == [2, 3]
    assert system.top(3, set(), 2) == [1, 2]
    assert system.top(3, {1}, 2) == [2, 3]


def test_an_item_without_followers_falls_back_to_popularity() -> None:
    system = LastItem(ITEMS, OFFSETS, Popularity(ITEMS, num_items=5))
    assert system.top(5, set(), 3) == [2, 3, 1]
    assert system.top(4, {2}, 3) == [3, 1, 4]


def test_users_without_training_events_do_not_hide_borders() -> None:
    system = LastItem(np.array([1, 2, 1, 3]), np.array([0, 0, 2, 2, 4]), Popularity(np.array([1, 2, 1, 3]), 3))
    assert system.top(1, set(), 2) == [2, 3]
    assert system.top(2, set(), 1) == [1]  # by popularity: nothing follows it inside a user


def test_take_allowed_looks_far_enough() -> None:
    assert take_allowed(np.arange(10), set(range(8)), 2) == [8, 9]
