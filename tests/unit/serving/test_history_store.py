"""The embedded store of histories."""

import pytest

from nestrec.serving.api.history_store import HistoryStoreConfig, MemoryHistoryStore, joined_history


def events(*times):
    return {"items": [f"i{t}" for t in times], "times_ms": list(times)}


def test_events_are_joined_in_order_and_bounded():
    store = MemoryHistoryStore(HistoryStoreConfig(max_events=3))
    assert store.append("a", events(1, 2)) == 2
    assert store.append("a", events(2, 3)) == 3
    assert store.get("a")["items"] == ["i2", "i2", "i3"]
    with pytest.raises(ValueError, match="older"):
        store.append("a", events(1))
    assert store.get("a")["times_ms"] == [2, 2, 3]


def test_columns_that_are_missing_on_one_side_are_filled():
    joined = joined_history(events(1), {**events(2), "actions": [3], "features": {"tab": ["home"]}}, 10)
    assert joined["actions"] == [None, 3], "not told is not the same as nothing done"
    assert joined["features"] == {"tab": [None, "home"]}


def test_the_least_recently_used_user_is_forgotten():
    store = MemoryHistoryStore(HistoryStoreConfig(max_users=2))
    store.append("a", events(1))
    store.append("b", events(1))
    store.get("a")
    store.append("c", events(1))
    assert store.get("b") is None
    assert store.get("a") is not None
    store.forget("a")
    assert store.get("a") is None
