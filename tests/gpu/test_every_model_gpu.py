"""Every model that is trained is served by a GPU: trained, exported, asked over HTTP, cached or not."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from every_model import ENCODERS, FULL, SERVICE, TASKS, Exports, answers_of

from nestrec.data.synthetic.synthetic_logs import generate, preset

pytestmark = pytest.mark.gpu


def served(cfg, **changes):
    """With pages as large as a kernel wants them at least, and graphs of small batches only: each takes a while."""
    tiers = replace(cfg.engine.tiers, page_tokens=16)
    return replace(cfg, engine=replace(cfg.engine, tiers=tiers, max_batch_tokens=256, **changes))


WHOLE, KEPT, EAGER, SMALL = (
    served(FULL), served(SERVICE), served(FULL, captured=False), served(SERVICE, prefix_dtype="fp8"))  # fmt: skip
ALWAYS = {("ranking", "hstu"), ("retrieval", "hstu_functional"), ("ranking", "fuxi"), ("retrieval", "sasrec")}
EACH = [pytest.param((task, name), id=f"{task}-{name}", marks=() if (task, name) in ALWAYS else pytest.mark.slow)
        for task in TASKS for name in ENCODERS]  # fmt: skip


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    data = tmp_path_factory.mktemp("data") / "small"
    generate(replace(preset("tiny"), num_users=300, num_items=200), data)
    return Exports(tmp_path_factory.mktemp("exports"), data)


def largest_difference(one, other):
    return max(np.abs(a - b).max() for (a, _), (b, _) in zip(one, other, strict=True))


SHARDS = [pytest.param(250 * s, 250, id=f"shard{s}", marks=pytest.mark.slow) for s in range(5)]
"""With four models and two tasks, 10,000 sequences."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", EACH)
@pytest.mark.parametrize(("first", "count"), [pytest.param(0, 3, id="some"), *SHARDS])
def test_cached_scores_over_http_are_those_of_uncached_requests(exports, model, first, count, capsys):
    """In float32 to 1e-5; in bfloat16 within twice the error of plain operators that keep nothing; 8 bits are told."""
    torch.set_float32_matmul_precision("highest")
    seeds = range(first, first + count)
    whole, half = exports.folder(*model), exports.folder(*model, "bfloat16")
    full, cached = (answers_of(whole, cfg, seeds, "cuda") for cfg in (WHOLE, KEPT))
    assert "device" in {source for _, sources in cached for source in sources}
    scale = max(1.0, *(np.abs(scores).max() for scores, _ in full))
    assert largest_difference(cached, full) <= 1e-5 * scale
    found = {kind: largest_difference(answers_of(half, cfg, seeds, "cuda"), full)
             for kind, cfg in (("cached", KEPT), ("eager", EAGER), ("8 bits", SMALL))}  # fmt: skip
    with capsys.disabled():
        print(f"\n{model}: {count} sequences, float32 {largest_difference(cached, full):.2e}, bfloat16 {found}")
    assert found["cached"] <= 2 * found["eager"]
