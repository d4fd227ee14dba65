"""The embedded store of histories."""

import random

import orjson
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
    joined = joined_history([events(1), {**events(2), "actions": [3], "features": {"tab": ["home"]}}])
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


def test_bytes_are_bounded_for_a_user_and_in_all_and_the_newest_events_stay():
    store = MemoryHistoryStore(HistoryStoreConfig(max_user_bytes=2000, max_bytes=5000))
    for number in range(300):
        store.append("a", {**events(number), "items": ["x" * 50 + str(number)]})
        kept = store.get("a")
        assert len(orjson.dumps(kept)) <= 2200
        assert kept["times_ms"] == list(range(number + 1 - len(kept["items"]), number + 1))
    assert len(kept["items"]) >= 10
    for user in range(50):
        store.append(f"u{user}", {**events(1, 2), "items": ["y" * 500] * 2})
        assert store.num_bytes <= 5000
    assert store.get("u49")["items"] == ["y" * 500] * 2
    assert store.get("a") is None
    store.append("huge", {**events(1, 2), "items": ["z" * 90_000, "last"]})
    assert store.get("huge")["items"] == ["last"]
    for user in ("huge", *(f"u{user}" for user in range(50))):
        store.forget(user)
    assert store.num_bytes == 0


def test_parts_make_no_difference():
    """Many small additions against one list, over random ones."""
    rng = random.Random(1)
    store, kept = MemoryHistoryStore(HistoryStoreConfig(max_events=150)), []
    for number in range(400):
        count = rng.choice([0, 1, 1, 2, 5])
        more = [(f"{number}-{i}", number, rng.choice([0, 1, "click", ["a"], None]), rng.choice(["x", None]))
                for i in range(count)]  # fmt: skip
        items, times, actions, tabs = (list(column) for column in (zip(*more, strict=True) if more else [[]] * 4))
        kept += more
        added = {"items": items, "times_ms": times, "actions": actions, "features": {"tab": tabs}}
        assert store.append("a", added) == min(150, len(kept))
        if rng.random() < 0.2 and kept:
            found = store.get("a")
            columns = (found["items"], found["times_ms"], found["actions"], found["features"]["tab"])
            assert list(zip(*columns, strict=True)) == kept[-150:]
