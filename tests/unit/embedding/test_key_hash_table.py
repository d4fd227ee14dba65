import numpy as np
import pytest

from nestrec.embedding.key_hash_table import KeyHashTable


@pytest.mark.parametrize("spread", [300, 2**62])
def test_key_hash_table_equals_dict(spread):
    draw = np.random.default_rng(0)
    table = KeyHashTable()
    expected = {}
    for step in range(400):
        keys = np.unique(draw.integers(-spread, spread, 60))
        slots = table.find(keys)
        assert slots.tolist() == [expected.get(k, -1) for k in keys.tolist()]
        absent = keys[slots < 0]
        new = table.insert(absent, np.ones(len(absent), np.int64), np.full(len(absent), step))
        expected |= dict(zip(absent.tolist(), new.tolist(), strict=True))
        assert len(set(expected.values())) == len(expected) == table.num_keys
        removed = draw.permutation(list(expected))[: draw.integers(0, 70)]
        table.remove(np.array([expected.pop(k) for k in removed.tolist()], np.int64))
    live = table.live_slots()
    assert dict(zip(table.key[live].tolist(), live.tolist(), strict=True)) == expected
    assert table.num_slots < 2000 or spread > 300
