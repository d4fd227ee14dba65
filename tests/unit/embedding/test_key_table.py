import numpy as np
import pytest

from nestrec.embedding.key_hash_table import KeyHashTable


@pytest.mark.parametrize("spread", [300, 2**62])
def test_a_key_table_is_a_dict_through_many_inserts_and_removals(spread):
    draw = np.random.default_rng(0)
    table = KeyHashTable()
    oracle = {}
    for step in range(400):
        keys = np.unique(draw.integers(-spread, spread, 60))
        slots = table.find(keys)
        assert slots.tolist() == [oracle.get(k, -1) for k in keys.tolist()]
        absent = keys[slots < 0]
        new = table.insert(absent, np.ones(len(absent), np.int64), np.full(len(absent), step))
        oracle |= dict(zip(absent.tolist(), new.tolist(), strict=True))
        assert len(set(oracle.values())) == len(oracle) == table.num_keys
        gone = draw.permutation(list(oracle))[: draw.integers(0, 70)]
        table.remove(np.array([oracle.pop(k) for k in gone.tolist()], np.int64))
    live = table.live_slots()
    assert dict(zip(table.key[live].tolist(), live.tolist(), strict=True)) == oracle
    assert table.num_slots < 2000 or spread > 300
