"""Rows of a table whose engine has a GPU, as they were at a moment: equal to a copy of that moment."""

import numpy as np
import pytest
import torch

from nestrec.embedding.shard import TableShard
from nestrec.embedding.table import StoreConfig, TableConfig

pytestmark = pytest.mark.gpu


def columns_of(chunks) -> dict[str, torch.Tensor]:
    parts = list(chunks)
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    order = joined["keys"].argsort()
    return {name: values[order] for name, values in joined.items()}


@pytest.mark.parametrize("may_change", [True, False])
@pytest.mark.parametrize("kind", ["device", "dram"])
def test_frozen_rows_are_those_of_the_moment(kind, may_change):
    table = TableConfig(name="t", dim=8, num_rows=5000, store=StoreConfig(kind=kind))
    shard = TableShard(table, 0, 1, torch.device("cuda"))

    def train(keys: np.ndarray, step: int) -> None:
        fetched = shard.fetch(keys, step)
        fetched.rows += step
        shard.write_back(fetched)

    train(np.arange(3000), 1)
    expected = columns_of(shard.snapshot())
    frozen = shard.freeze(max_bytes=1 << 20 if may_change else None)
    if may_change:
        train(np.arange(1000, 4000), 2)
    found = columns_of(frozen)
    frozen.close()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name
