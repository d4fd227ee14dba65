"""Every backbone and task is trained, exported and served over HTTP on a GPU, with and without the prefix cache."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from every_model import ENCODERS, SERVICE, TASKS, WITHOUT_CACHE, Exports, scores_and_sources

from nestrec.data.synthetic.synthetic_logs import generate, preset

pytestmark = pytest.mark.gpu


def gpu_config(cfg, **changes):
    """Return the config with the smallest page size of the kernels, and with few CUDA graphs: each takes a while."""
    tiers = replace(cfg.engine.prefix_cache, page_tokens=16)
    return replace(cfg, engine=replace(cfg.engine, prefix_cache=tiers, max_batch_tokens=256, **changes))


UNCACHED = gpu_config(WITHOUT_CACHE)
CACHED = gpu_config(SERVICE)
EAGER = gpu_config(WITHOUT_CACHE, cuda_graphs=False)
FP8 = gpu_config(SERVICE, kv_cache_dtype="fp8")
NOT_SLOW = {("ranking", "hstu"), ("retrieval", "hstu_functional"), ("ranking", "fuxi"), ("retrieval", "sasrec")}
MODELS = [pytest.param((task, name), id=f"{task}-{name}", marks=() if (task, name) in NOT_SLOW else pytest.mark.slow)
        for task in TASKS for name in ENCODERS]  # fmt: skip


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    data = tmp_path_factory.mktemp("data") / "small"
    generate(replace(preset("tiny"), num_users=300, num_items=200), data)
    return Exports(tmp_path_factory.mktemp("exports"), data)


def largest_difference(one, other):
    return max(np.abs(a - b).max() for (a, _), (b, _) in zip(one, other, strict=True))


SHARDS = [pytest.param(250 * s, 250, id=f"shard{s}", marks=pytest.mark.slow) for s in range(5)]
"""10,000 sequences in total: 1,250 per model, four encoders and two tasks."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("first", "count"), [pytest.param(0, 3, id="some"), *SHARDS])
def test_http_prefix_cache_scores_equal_uncached(exports, model, first, count, capsys):
    """Float32 agrees to 1e-5, bfloat16 within twice the error of eager uncached operators; fp8 errors are printed."""
    torch.set_float32_matmul_precision("highest")
    seeds = range(first, first + count)
    float32, bfloat16 = exports.folder(*model), exports.folder(*model, "bfloat16")
    full, cached = (scores_and_sources(float32, cfg, seeds, "cuda") for cfg in (UNCACHED, CACHED))
    assert "device" in {source for _, sources in cached for source in sources}
    scale = max(1.0, *(np.abs(scores).max() for scores, _ in full))
    assert largest_difference(cached, full) <= 1e-5 * scale
    found = {kind: largest_difference(scores_and_sources(bfloat16, cfg, seeds, "cuda"), full)
             for kind, cfg in (("cached", CACHED), ("eager", EAGER), ("fp8", FP8))}  # fmt: skip
    with capsys.disabled():
        print(f"\n{model}: {count} sequences, float32 {largest_difference(cached, full):.2e}, bfloat16 {found}")
    assert found["cached"] <= 2 * found["eager"]
