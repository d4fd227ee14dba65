"""A restarted batch job names parts that were damaged in between."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nestrec.base.errors import CorruptFileError
from nestrec.inference.batch_inference import BatchJobConfig
from nestrec.inference.recommender import Recommender
from nestrec.models import HSTUConfig
from nestrec_bench.harness.random_model import random_retrieval
from support.fail_points import armed


class CrashError(Exception):
    pass


def crash() -> None:
    raise CrashError


@pytest.mark.parametrize("name", ["part-000000.parquet", "job.json"])
@pytest.mark.parametrize("length", [0, 20])
def test_batch_inference_names_damaged_part(tmp_path: Path, name: str, length: int) -> None:
    shape = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=8)
    model = Recommender(random_retrieval(shape, num_items=20))
    users = {"user": ["a", "b"], "items": [[model.item_ids[0]], [model.item_ids[1]]], "times_ms": [[1], [2]]}
    pq.write_table(pa.table(users), tmp_path / "users.parquet")
    batch = model.batch(BatchJobConfig(k=3, part_users=1))
    output = tmp_path / "recs.parquet"
    with armed("batch.part_written", crash, at=2), pytest.raises(CrashError):
        batch.recommend(tmp_path / "users.parquet", output)
    damaged = tmp_path / "recs.parquet.parts" / name
    content = damaged.read_bytes()
    damaged.write_bytes(content[:length])
    with pytest.raises(CorruptFileError) as raised:
        batch.recommend(tmp_path / "users.parquet", output)
    assert raised.value.value == str(damaged)
    damaged.unlink() if name.startswith("part") else damaged.write_bytes(content)
    assert batch.recommend(tmp_path / "users.parquet", output) == 2
