"""Random request sequences on a GPU: cached bfloat16 has at most twice the error of uncached, eager bfloat16."""

from functools import cache

import numpy as np
import pytest
import torch
from serving_oracle import oracle_scores
from serving_sequences import Sequences

from nestrec.models import FuXiConfig, HSTUConfig, SASRecConfig
from nestrec.serving.engine.batch_scheduler import EngineConfig
from nestrec.serving.engine.reference_runner import BatchItem, ReferenceRunner
from nestrec.serving.engine.serving_engine import Engine, make_runner
from nestrec.serving.kv_cache.kv_page_pool import pool_for
from nestrec.serving.kv_cache.preinfer_trigger import TriggerConfig
from nestrec.serving.kv_cache.tiered_prefix_cache import PrefixCacheConfig
from nestrec.serving.model.model_adapter import make_adapter
from nestrec_bench.harness.random_model import random_ranking

pytestmark = pytest.mark.gpu
SIZES = {"dim": 32, "num_layers": 2, "num_heads": 2, "head_dim": 16, "max_length": 64}
ENCODERS = {
    "plain": HSTUConfig(**SIZES, position_bias=False),
    "biased": HSTUConfig(**SIZES, time_bias=True),
    "functional": HSTUConfig(**SIZES, time_bias=True, time_encoding="functional"),
    "fuxi": FuXiConfig(**SIZES, ffn_dim=32),
    "sasrec": SASRecConfig(**{name: size for name, size in SIZES.items() if name != "head_dim"}, ffn_dim=32),
}
PAGE_TOKENS, SLIDE = 16, 4
TIERS = PrefixCacheConfig(
    device_bytes=12 * PAGE_TOKENS * 256,
    host_bytes=1 << 16,
    page_tokens=PAGE_TOKENS,
    offload_threshold=0.0,
    device_ttl_s=90.0,
    reload_policy="always",
)
CONFIG = EngineConfig(
    prefix_cache=TIERS, max_batch_tokens=512, max_queue_delay_s=1e9, preinfer=TriggerConfig(policy="all", burst_s=1e9)
)


@cache
def runner_of(kind, seed):
    """Return the KV cache and the CUDA graphs of a model; engines use it one after the other."""
    encoder = ENCODERS[kind]
    device = torch.device("cuda")
    form = make_adapter(random_ranking(encoder, num_items=200, seed=seed, device=device, dtype=torch.bfloat16), SLIDE)
    pool = pool_for(form.servable, cache_bytes=TIERS.device_bytes, page_tokens=PAGE_TOKENS)
    return make_runner(form, pool, CONFIG)


@cache
def exact_model(kind, seed):
    return random_ranking(ENCODERS[kind], num_items=200, seed=seed, dtype=torch.float64)


class Bfloat16AgainstFloat64(Sequences):
    def __init__(self, kind, seed):
        self.kind = kind
        self.worst = {"cached": 0.0, "eager": 0.0}
        super().__init__(seed)

    def make_engine(self):
        runner = runner_of(self.kind, self.current)
        return Engine(runner.adapter, CONFIG, clock=self.clock, runner=runner)

    def check(self, history, candidates, answer):
        runner = runner_of(self.kind, self.current)
        assert answer.version == runner.adapter.servable.version
        tokens = runner.adapter.tokens(history, candidates.now_ms)
        part = BatchItem(tokens=tokens, first=0, end=tokens.length, pages=[], store_until=0, candidates=candidates)
        eager = ReferenceRunner(runner.adapter, runner.pool).run([part])[0].scores
        exact = oracle_scores(exact_model(self.kind, self.current), history, candidates, SLIDE)
        for name, scores in (("cached", answer.scores), ("eager", eager)):
            self.worst[name] = max(self.worst[name], float(np.abs(scores - exact).max()))


SHARDS = [pytest.param(250 * s, 250, id=f"shard{s}", marks=pytest.mark.slow) for s in range(8)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", list(ENCODERS))
@pytest.mark.parametrize(("first", "num_sequences"), [pytest.param(0, 20, id="some"), *SHARDS])
def test_kv_cache_bfloat16_error_is_bounded(kind, first, num_sequences, capsys):
    worst, sources = {"cached": 0.0, "eager": 0.0}, {"none": 0, "device": 0, "host": 0}
    for seed in range(first, first + num_sequences):
        sequences = Bfloat16AgainstFloat64(kind, seed)
        sequences.run(40)
        worst = {name: max(worst[name], sequences.worst[name]) for name in worst}
        sources = {name: count + sequences.sources[name] for name, count in sources.items()}
    with capsys.disabled():
        print(f"\n{kind}: {num_sequences} sequences, largest differences {worst}, prefixes from {sources}")
    assert worst["cached"] <= 2 * worst["eager"]
    assert min(sources.values()) > 0
