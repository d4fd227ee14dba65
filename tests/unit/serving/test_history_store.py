"""The in-memory history store and the encoding of histories."""

import random

import pytest

from nestrec.serving.history_store.history_codec import (
    CorruptHistoryError,
    concatenate_histories,
    decode_parts,
    encode_events,
)
from nestrec.serving.history_store.history_store import HistoryStoreConfig
from nestrec.serving.history_store.memory_store import MemoryHistoryStore
from nestrec_bench.harness.clocks import ManualClock


class SyncHistoryStore:
    """The in-memory store with synchronous methods; it never waits, so it needs no event loop."""

    def __init__(self, cfg, clock=None):
        self._store = MemoryHistoryStore(cfg, clock)

    def __getattr__(self, name):
        found = getattr(self._store, name)
        return (lambda *arguments: _result(found(*arguments))) if callable(found) else found


def _result(call):
    try:
        call.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the store must not wait")


def events(*times):
    return {"items": [f"i{t}" for t in times], "times_ms": list(times)}


def test_history_store_orders_and_bounds_events():
    store = SyncHistoryStore(HistoryStoreConfig(max_events=3))
    assert store.append("a", events(1, 2)) == 2
    assert store.append("a", events(2, 3)) == 3
    assert store.get("a")["items"] == ["i2", "i2", "i3"]
    assert store.append("a", events(1)) == 3
    assert store.get("a")["times_ms"] == [2, 2, 3], "events beyond max_events must not be stored"


def test_history_codec_fills_missing_columns():
    joined = concatenate_histories([events(1), {**events(2), "actions": [3], "features": {"tab": ["home"]}}])
    assert joined["actions"] == [None, 3], "a missing column differs from one without actions"
    assert joined["features"] == {"tab": [None, "home"]}


def test_history_store_evicts_least_recently_used_user():
    store = SyncHistoryStore(HistoryStoreConfig(max_users=2))
    store.append("a", events(1))
    store.append("b", events(1))
    store.get("a")
    store.append("c", events(1))
    assert store.get("b") is None
    assert store.get("a") is not None
    store.forget("a")
    assert store.get("a") is None


def test_history_store_bytes_are_bounded():
    store = SyncHistoryStore(HistoryStoreConfig(max_user_bytes=2000, max_bytes=5000))
    for number in range(300):
        store.append("a", {**events(number), "items": ["x" * 50 + str(number)]})
        stored = store.get("a")
        assert len(encode_events("a", stored)) <= 2000
        assert stored["times_ms"] == list(range(number + 1 - len(stored["items"]), number + 1))
    assert len(stored["items"]) >= 10
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


def test_history_store_appends_equal_one_history():
    """Random small appends give the same history as one list."""
    rng = random.Random(1)
    store = SyncHistoryStore(HistoryStoreConfig(max_events=150))
    stored = []
    for number in range(400):
        count = rng.choice([0, 1, 1, 2, 5])
        more = [
            (f"{number}-{i}", number, rng.choice([0, 1, "click", ["a"], None]), rng.choice(["x", None]))
            for i in range(count)
        ]
        items, times, actions, tabs = (list(column) for column in (zip(*more, strict=True) if more else [[]] * 4))
        stored += more
        added = {"items": items, "times_ms": times, "actions": actions, "features": {"tab": tabs}}
        assert store.append("a", added) == min(150, len(stored))
        if rng.random() < 0.2 and stored:
            found = store.get("a")
            columns = (found["items"], found["times_ms"], found["actions"], found["features"]["tab"])
            assert list(zip(*columns, strict=True)) == stored[-150:]


def test_history_store_expires_users_after_last_event():
    clock = ManualClock()
    store = SyncHistoryStore(HistoryStoreConfig(ttl_s=10.0), clock)
    store.append("a", events(1))
    clock.sleep(9.0)
    store.append("a", events(2))
    clock.sleep(9.0)
    assert store.get("a")["times_ms"] == [1, 2]
    clock.sleep(2.0)
    assert store.get("a") is None
    assert store.num_bytes == 0


WORDS = ["", "0", "7", "12", "007", "-1", "9" * 18, "9" * 30, "ä\u2028", "click"]
NUMBERS = [0, 1, -1, 255, 256, 65536, 2**32, -(2**63), 2**63 - 1, 2**63, 2**64 - 1]
KINDS = [
    WORDS,
    NUMBERS,
    NUMBERS[:4],
    NUMBERS[:-2],
    WORDS[1:4],
    [None],
    [*WORDS, None],
    [["a"], ["a", "b"], []],
    [*NUMBERS, *WORDS],
]


def test_history_codec_round_trip():
    rng = random.Random(5)
    for _ in range(300):
        parts = []
        for _ in range(rng.randrange(4)):
            count = rng.choice([0, 1, 2, 3, 9])
            columns = [[rng.choice(kind) for _ in range(count)] for kind in rng.sample(KINDS, 4)]
            items = [rng.choice(rng.choice([WORDS, NUMBERS[:-2], [7]])) for _ in range(count)]
            times = sorted(rng.choice([rng.randrange(2**43), rng.randrange(300)]) for _ in range(count))
            features = dict(zip(rng.sample(["tab", "ä", ""], 2), columns, strict=False))
            actions = rng.choice([columns[2], None])
            parts.append({"items": items, "times_ms": times, "actions": actions, "features": features})
        read = decode_parts("ann", b"".join(encode_events("ann", part) for part in parts))
        assert concatenate_histories(read) == concatenate_histories(parts)


def test_history_codec_rejects_corrupt_or_foreign_history():
    part = encode_events("ann", events(1, 2, 3))
    assert decode_parts("ann", part + part)[1]["times_ms"] == [1, 2, 3]
    with pytest.raises(CorruptHistoryError):
        decode_parts("bob", part)
    for index in range(len(part)):
        damaged = bytearray(part)
        damaged[index] ^= 1
        with pytest.raises(CorruptHistoryError):
            decode_parts("ann", bytes(damaged))
        if index:
            with pytest.raises(CorruptHistoryError):
                decode_parts("ann", part + part[:index])


def test_history_codec_uses_few_bytes_per_event():
    rng = random.Random(2)
    times = sorted(rng.randrange(1_600_000_000_000, 1_620_000_000_000) for _ in range(1000))
    items, tabs = [str(rng.randrange(10**6)) for _ in times], [rng.choice(["home", "search"]) for _ in times]
    history = {"items": items, "times_ms": times, "actions": ["click"] * 1000, "features": {"tab": tabs}}
    assert len(encode_events("ann", history)) < 11 * 1000, "4 bytes for the item, 4 for the time, 1 for each text"
