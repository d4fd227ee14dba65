"""Serving on a GPU: cached scores equal uncached ones, in float32 and within twice the error of bfloat16."""

import numpy as np
import pytest
import torch

from nestrec.models.hstu import HSTUConfig
from nestrec.serving.engine import Engine, EngineConfig
from nestrec.serving.forms import make_form
from nestrec.serving.inputs import Candidates, History
from nestrec.serving.random_model import random_ranking
from nestrec.serving.tiers import TiersConfig
from nestrec.serving.trigger import TriggerConfig

pytestmark = pytest.mark.gpu
ENCODER = HSTUConfig(dim=64, num_layers=3, num_heads=2, head_dim=32, max_length=1026, time_bias=True)


def scores_of(device, dtype, *, keeps_prefix):
    rng = np.random.default_rng(1)
    cfg = EngineConfig(
        tiers=TiersConfig(cache_bytes=1 << 26, keeps_prefix=keeps_prefix), max_queue_s=1e9,
        trigger=TriggerConfig(policy="all", burst_s=1e9),
    )  # fmt: skip
    engine = Engine(make_form(random_ranking(ENCODER, device=device, dtype=dtype)), cfg)
    answers = []
    for user in range(8):
        count = int(rng.integers(100, 512))
        history = History(
            items=rng.integers(1, 1000, count), times_ms=np.sort(rng.integers(0, 10**10, count)),
            actions=rng.integers(0, 4, count), features={"event_tab": rng.integers(0, 3, count)},
        )  # fmt: skip
        asked = Candidates(
            items=rng.integers(1, 1000, 64), now_ms=2 * 10**10, features={"event_tab": rng.integers(0, 3, 64)}
        )
        works = [engine.rank(str(user), history, asked, timeout_s=60.0) for _ in range(2)]
        answers += [work.future.result(60.0).scores for work in works]
    engine.close()
    return np.stack(answers)


def test_cached_scores_on_a_gpu_equal_uncached_ones():
    torch.set_float32_matmul_precision("highest")
    full = scores_of("cuda", torch.float32, keeps_prefix=False)
    assert np.abs(scores_of("cuda", torch.float32, keeps_prefix=True) - full).max() <= 1e-5
    assert np.abs(scores_of("cpu", torch.float32, keeps_prefix=False) - full).max() <= 1e-4


def test_cached_bfloat16_is_as_good_as_uncached_bfloat16():
    exact = scores_of("cpu", torch.float64, keeps_prefix=False)
    eager = np.abs(scores_of("cuda", torch.bfloat16, keeps_prefix=False) - exact).max()
    assert np.abs(scores_of("cuda", torch.bfloat16, keeps_prefix=True) - exact).max() <= 2 * eager
