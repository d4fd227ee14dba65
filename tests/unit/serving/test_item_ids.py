"""The map from item keys of the source to item ids."""

import random
import tracemalloc

import pytest

from nestrec.serving.model.item_id_map import ItemIds

CATALOGS = {
    "counted": [str(i) for i in range(1, 200)],
    "from zero": [str(i) for i in range(200)],
    "shuffled": [str((i * 77) % 311) for i in range(300)],
    "sparse": [str(i * 1000) for i in range(50)],
    "negative": [str(i) for i in range(-5, 90)],
    "text": ["a", "b c", "1 ", "01", "-0", "1_0", "9" * 30, "9" * 19],
    "mixed": ["x", "5", "07", "3", "y", "2"],
    "none": [],
}


@pytest.mark.parametrize("name", CATALOGS)
def test_item_id_map_batch_equals_single_lookups(name):
    keys = CATALOGS[name]
    ids = ItemIds(keys)
    rng = random.Random(name)
    known = {key: i + 1 for i, key in enumerate(keys)}
    odd = [0, 1, -1, 5, 310, 311, 2**31, 2**63 - 1, 2**63, 2**64 + 3, -(2**63), -(2**63) - 1, "1", " 1", "1 ", "", "x"]
    numbers = [int(key) for key in keys if key.isdecimal() and len(key) < 20]
    for pool in (odd, [*keys, *odd], [k for k in odd if isinstance(k, int)] + numbers, numbers):
        for _ in range(20):
            requested = [rng.choice(pool) for _ in range(rng.randrange(9))] if pool else []
            # An integer matches the key that is its decimal text.
            assert ids.of(requested).tolist() == [known.get(str(key), 0) for key in requested]


@pytest.mark.parametrize("wrong", [True, 1.0, None, [1], {}])
def test_item_id_map_rejects_other_types(wrong):
    for keys in ([wrong], [1, 2, wrong], ["a", wrong]):
        with pytest.raises(TypeError):
            ItemIds(CATALOGS["counted"]).of(keys)


def test_item_id_map_appends_without_copying():
    """Batches wait during an append, so it must be short."""
    keys = [str(i) for i in range(20_000)]
    ids = ItemIds(keys)
    for number in range(20_000, 20_020):
        tracemalloc.start()
        ids.grow([str(number), f"text {number}"], len(keys))
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert number == 20_000 or peak_bytes < 8 * len(keys) / 4  # the first append may reallocate
        keys += [str(number), f"text {number}"]
        assert ids.of([number, number + 1, str(number)]).tolist() == [len(keys) - 1, 0, len(keys) - 1]
        assert ids.of([f"text {number}", 0]).tolist() == [len(keys), 1]
