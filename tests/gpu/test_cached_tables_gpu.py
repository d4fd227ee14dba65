"""Tables in DRAM or on disk with a row cache on a GPU: rows and scores are bitwise identical."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from nestrec.models.hstu import HSTUConfig
from nestrec.serving.engine.batch_scheduler import EngineConfig
from nestrec.serving.engine.graph_runner import GraphRunner
from nestrec.serving.engine.reference_runner import BatchItem
from nestrec.serving.engine.serving_engine import make_runner
from nestrec.serving.kv_cache.kv_page_pool import PagePool
from nestrec.serving.model.model_adapter import make_adapter
from nestrec.serving.model.request_inputs import Candidates, History
from nestrec.serving.model.row_sources import DramRows
from nestrec.serving.model.served_tables import CachedTable, TablesConfig, open_table
from nestrec_bench.harness.random_model import random_ranking

pytestmark = pytest.mark.gpu
ENCODER = HSTUConfig(dim=64, num_layers=2, num_heads=2, head_dim=32, max_length=1026, position_bias=False)
CUDA = torch.device("cuda")


@pytest.mark.parametrize("store", ["dram", "disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_cache_is_bitwise_identical_and_bounded(tmp_path, store, dtype):
    weight = torch.randn(5000, 96).to(dtype)
    rng = np.random.default_rng(1)
    save_file({"weight": weight}, tmp_path / "table.safetensors")
    table = open_table(tmp_path / "table.safetensors", "weight", CUDA, TablesConfig(store=store, cache_rows=700))
    for _ in range(100):
        ids = torch.from_numpy(rng.zipf(1.2, int(rng.integers(0, 3000))) % 5000)
        assert torch.equal(table.rows(ids).cpu(), weight[ids])
        assert table.statistics()["device_rows"] <= 700


def draw_batches(form, rng):
    for _ in range(12):
        parts = []
        for _ in range(int(rng.integers(1, 8))):
            count = int(rng.integers(1, 500))
            history = History(
                items=rng.integers(0, 1000, count),
                times_ms=np.zeros(count, np.int64),
                actions=rng.integers(0, 4, count),
                features={"event_tab": rng.integers(0, 3, count)},
            )
            candidates = Candidates(
                items=rng.integers(0, 1000, 64), now_ms=0, features={"event_tab": rng.integers(0, 3, 64)}
            )
            tokens = form.tokens(history, 0)
            parts.append(
                BatchItem(tokens=tokens, first=0, end=tokens.length, pages=[], store_until=0, candidates=candidates)
            )
        yield parts


def run_batches(runner, batches):
    """Yield scores in order, with `runner.depth` batches in flight: the buffers of earlier batches are overwritten."""
    launched = deque()
    for parts in batches:
        if len(launched) == runner.depth:
            yield from launched.popleft().wait()[0]
        launched.append(runner.launch(parts))
    for batch in launched:
        yield from batch.wait()[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_cache_cuda_graph_scores_are_bitwise_identical(dtype):
    """Two batches are in flight at once, each with more distinct items than the cache holds."""
    servable = random_ranking(ENCODER, device=CUDA, dtype=dtype)
    cached = CachedTable(DramRows(servable.tables["items"].weight.cpu()), CUDA, 100)
    results = []
    for tables in (servable.tables, {**servable.tables, "items": cached}):
        form = make_adapter(replace(servable, tables=tables))
        pool = PagePool(ENCODER, num_pages=1, page_tokens=64, device=CUDA, dtype=dtype)
        runner = make_runner(form, pool, EngineConfig())
        assert isinstance(runner, GraphRunner)
        results.append([scored.scores for scored in run_batches(runner, draw_batches(form, np.random.default_rng(2)))])
    assert all(np.array_equal(one, other) for one, other in zip(*results, strict=True))
    assert cached.statistics()["device_rows"] == 100
