"""The serving engine: scores with cached prefixes equal those of full inference in any state of the cache."""

import math
import threading
import time
from concurrent.futures import CancelledError
from dataclasses import replace

import numpy as np
import pytest
import torch
from serving_oracle import oracle_scores
from serving_sequences import Sequences, draw_candidates, draw_history, extend_history

from nestrec.models import FuXiConfig, HSTUConfig, SASRecConfig
from nestrec.models.backbone_spec import AttentionSpanConfig
from nestrec.serving.core.background_tasks import Failures
from nestrec.serving.core.cost_model import EngineCostModel
from nestrec.serving.core.rejections import OverloadedError, UnavailableError
from nestrec.serving.core.request_limits import RequestSource
from nestrec.serving.engine.batch_scheduler import EngineConfig
from nestrec.serving.engine.reference_runner import InFlightBatch, ReferenceRunner
from nestrec.serving.engine.serving_engine import Engine
from nestrec.serving.kv_cache.host_prefix_cache import HostPages
from nestrec.serving.kv_cache.kv_page_pool import PagePool
from nestrec.serving.kv_cache.preinfer_trigger import TriggerConfig
from nestrec.serving.kv_cache.tiered_prefix_cache import PrefixCacheConfig
from nestrec.serving.model.model_adapter import make_adapter
from nestrec_bench.harness.clocks import ManualClock
from nestrec_bench.harness.random_model import random_ranking, random_retrieval

SIZES = {"dim": 16, "num_layers": 2, "num_heads": 2, "max_length": 32}
ENCODER = HSTUConfig(**SIZES, head_dim=8, time_bias=True)
ENCODERS = (
    ENCODER,
    replace(ENCODER, time_encoding="functional", attention=AttentionSpanConfig(window=7, num_prefix_tokens=3)),
    replace(ENCODER, num_layers=3, attention=AttentionSpanConfig(window=9, truncate_to=8, truncate_step=6)),
    FuXiConfig(**SIZES, head_dim=8, ffn_dim=16, attention=AttentionSpanConfig(window=9)),
    SASRecConfig(**SIZES, ffn_dim=16),
)
TIERS = PrefixCacheConfig(
    device_bytes=3 << 13,
    host_bytes=1 << 15,
    page_tokens=4,
    offload_threshold=0.0,
    device_ttl_s=90.0,
    reload_policy="always",
)
CONFIG = EngineConfig(prefix_cache=TIERS, max_queue_delay_s=1e9, preinfer=TriggerConfig(policy="all", burst_s=1e9))
MODELS = {"retrieval": random_retrieval, "ranking": random_ranking}
HISTORY_STRIDE = 4
TIMEOUT_S = 60.0


def make_engine(servable, cfg=CONFIG, clock=None, slide_events=None):
    return Engine(make_adapter(servable, slide_events), cfg, clock=clock)


@pytest.fixture(params=list(MODELS))
def servable(request):
    return MODELS[request.param](replace(ENCODER), num_items=200)


class CachedAgainstUncached(Sequences):
    """Request sequences that alternate between two models; the oracle is the training model."""

    def __init__(self, make_model, seed):
        encoder = ENCODERS[seed % len(ENCODERS)]
        self.models = [make_model(encoder, num_items=200, seed=s) for s in range(2)]
        self.worst = 0.0
        super().__init__(seed)

    def make_engine(self):
        return make_engine(self.models[self.current], clock=self.clock, slide_events=HISTORY_STRIDE)

    def check(self, history, candidates, result):
        model = self.models[self.current]
        assert result.version == model.version
        if len(history) or "event_tab" in model.tables:
            expected = oracle_scores(model, history, candidates, HISTORY_STRIDE)
            error = float(np.abs(result.scores - expected).max() / max(1.0, np.abs(expected).max()))
            self.worst = max(self.worst, error)


NUM_SHARDS = 20
SHARD_SEQUENCES = 250
SHARDS = [
    pytest.param(s * SHARD_SEQUENCES, SHARD_SEQUENCES, 40, id=f"shard{s}", marks=pytest.mark.slow)
    for s in range(NUM_SHARDS)
]
"""10,000 sequences with two kinds of models, sharded for parallel test processes."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize(("first", "num_sequences", "length"), [pytest.param(0, 12, 60, id="few"), *SHARDS])
def test_prefix_cache_scores_equal_full_inference(kind, first, num_sequences, length, capsys):
    """Random appends, slides, evictions, offloads, reloads, expirations, erasures, changes and swaps."""
    worst = 0.0
    sources = {"none": 0, "device": 0, "host": 0}
    for seed in range(first, first + num_sequences):
        sequences = CachedAgainstUncached(MODELS[kind], seed)
        sequences.run(length)
        worst = max(worst, sequences.worst)
        sources = {name: count + sequences.sources[name] for name, count in sources.items()}
    with capsys.disabled():
        print(f"\n{kind}: {num_sequences} sequences, largest difference {worst:.1e}, prefixes from {sources}")
    assert worst <= 1e-5
    assert min(sources.values()) > 0


def test_kv_cache_fp8_scores_are_close_at_half_memory():
    model = random_ranking(ENCODER, num_items=200, dtype=torch.bfloat16)
    scores = []
    num_pages = []
    for prefix_dtype in ("model", "fp8"):
        engine = make_engine(model, replace(CONFIG, kv_cache_dtype=prefix_dtype))
        rng = np.random.default_rng(1)
        history = draw_history(rng, 15)
        engine.submit_preinfer("a", history, 0, 3, timeout_s=TIMEOUT_S)[1].future.result(TIMEOUT_S)
        candidates = draw_candidates(rng, history, 50)
        result = engine.submit_rank("a", history, candidates, timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
        assert result.source == "device"
        scores.append(result.scores)
        num_pages.append(engine.tiers.device.num_pages)
        engine.close()
    assert 0 < np.abs(scores[1] - scores[0]).max() <= 0.05 * np.abs(scores[0]).max()
    assert num_pages[1] >= 1.6 * num_pages[0]  # not 2: each head of 8 values has a scale


def test_prefix_cache_history_change_during_prefill(servable, monkeypatch):
    rng = np.random.default_rng(3)
    history = draw_history(rng, 12)
    engine = make_engine(servable)
    launch = engine._runner.launch

    def launch_and_change(parts):
        launched = launch(parts)
        history.items[0] = history.items[0] % 199 + 1
        return launched

    monkeypatch.setattr(engine._runner, "launch", launch_and_change)
    engine.submit_preinfer("a", history, 0, 3, timeout_s=TIMEOUT_S)[1].future.result(TIMEOUT_S)
    monkeypatch.setattr(engine._runner, "launch", launch)
    candidates = draw_candidates(rng, history)
    result = engine.submit_rank("a", history, candidates, timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    expected = oracle_scores(servable, history, candidates, engine.adapter.slide_events)
    assert np.abs(result.scores - expected).max() <= 1e-5 * max(1.0, np.abs(expected).max())
    engine.close()


def test_prefix_cache_hit_computes_only_new_tokens(servable):
    rng = np.random.default_rng(1)
    history = draw_history(rng, 12)
    engine = make_engine(servable)
    candidates = draw_candidates(rng, history)
    engine.submit_preinfer("a", history, 0, 3, timeout_s=TIMEOUT_S)[1].future.result(TIMEOUT_S)
    result = engine.submit_rank("a", history, candidates, timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    assert result.source == "device"
    assert result.num_cached == engine.adapter.tokens(history, 0).num_cacheable
    longer = extend_history(rng, history, 2)
    again = engine.submit_rank("a", longer, draw_candidates(rng, longer), timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    assert again.num_cached == result.num_cached
    other = engine.submit_rank("b", history, candidates, timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    assert other.source == "none"
    assert np.abs(other.scores - result.scores).max() <= 1e-5 * max(1.0, np.abs(other.scores).max())
    engine.close()


def test_engine_batches_concurrent_requests(servable):
    rng = np.random.default_rng(2)
    engine = make_engine(servable)
    queries = []
    for _ in range(40):
        history = draw_history(rng, int(rng.integers(1, 40)))
        queries.append((history, draw_candidates(rng, history)))
    with engine._condition:  # so that all are queued before the first batch
        requests = [engine.submit_rank(str(u % 7), *pair, timeout_s=TIMEOUT_S) for u, pair in enumerate(queries)]
    for request, (history, candidates) in zip(requests, queries, strict=True):
        expected = oracle_scores(servable, history, candidates, engine.adapter.slide_events)
        scores = request.future.result(TIMEOUT_S).scores
        assert np.abs(scores - expected).max() <= 1e-5 * max(1.0, np.abs(expected).max())
    assert engine.counts["batches"] < 40
    assert engine.queued_s == 0.0
    engine.close()


class LateDevice(ReferenceRunner):
    """Runner whose batches finish 10 ms after their launch."""

    depth = 2

    def launch(self, parts):
        results = self.run(parts)
        ends_s = time.perf_counter() + 0.01

        def wait():
            time.sleep(max(0.0, ends_s - time.perf_counter()))
            return results, 0.01

        return InFlightBatch(wait, lambda: time.perf_counter() >= ends_s)


def test_engine_responds_when_batch_ends(monkeypatch):
    monkeypatch.setattr(EngineCostModel, "predict_s", lambda self, *args, **options: 30.0)
    form = make_adapter(random_ranking(ENCODER, num_items=200))
    pool = PagePool(ENCODER, num_pages=32, page_tokens=4, device=torch.device("cpu"), dtype=torch.float32)
    engine = Engine(form, CONFIG, runner=LateDevice(form, pool))
    rng = np.random.default_rng(9)
    history = draw_history(rng, 10)
    candidates = draw_candidates(rng, history)
    start_s = time.perf_counter()
    requests = [engine.submit_rank(str(user), history, candidates, timeout_s=1e9) for user in range(3)]
    results = [request.future.result(TIMEOUT_S) for request in requests]
    assert time.perf_counter() - start_s < 25.0
    expected = oracle_scores(form.servable, history, candidates, form.slide_events)
    assert max(np.abs(result.scores - expected).max() for result in results) <= 1e-5
    assert all(r.launched_s >= r.planned_s >= start_s for r in requests)
    engine.close()


@pytest.mark.parametrize("most_seen", [(), (7, 32)])
def test_cost_model_tokens_within_is_total_and_monotonic(most_seen):
    costs = EngineCostModel(max_keys_per_layer=most_seen, pair_s=1e-3)
    seconds = [-math.inf, -1e300, -1.0, 0.0, 5e-324, 1e-9, 1e-3, 1.0, 1e300, math.inf]
    for prefix in (0, 5, 10**6):
        counts = [costs.tokens_within(each, prefix) for each in seconds]
        assert counts == sorted(counts)
        assert counts[:4] == [0] * 4
        assert counts[-1] > 10**6


def fixed_tokens_within(_costs, seconds, _prefix):
    """Return the number of tokens at 10 us per token; the measured cost of so small a model is mostly noise."""
    return int(min(seconds, 1e9) / 1e-5)


def test_preinfer_is_chunked_by_time(monkeypatch):
    monkeypatch.setattr(EngineCostModel, "tokens_within", fixed_tokens_within)
    encoder = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=1024)
    servable = random_retrieval(encoder, num_items=200)
    rng = np.random.default_rng(10)
    history = draw_history(rng, 1000)
    batches = {}
    for chunk_ms in (0.0, 1e-6):
        tiers = replace(TIERS, device_bytes=1 << 20)
        engine = make_engine(servable, replace(CONFIG, prefix_cache=tiers, preinfer_chunk_ms=chunk_ms))
        engine.submit_preinfer("a", history, 0, 3, timeout_s=1e9)[1].future.result(TIMEOUT_S)
        batches[chunk_ms] = engine.counts["batches"]
        candidates = draw_candidates(rng, history)
        result = engine.submit_rank("a", history, candidates, timeout_s=1e9).future.result(TIMEOUT_S)
        assert result.num_cached == 999
        expected = oracle_scores(servable, history, candidates, engine.adapter.slide_events)
        assert np.abs(result.scores - expected).max() <= 1e-5 * max(1.0, np.abs(expected).max())
        engine.close()
    assert batches == {0.0: 1, 1e-6: 4}, "chunks of 256 tokens"


@pytest.mark.parametrize(
    "options", [{"preinfer_chunk_ms": 0.0}, {"preinfer": replace(CONFIG.preinfer, latency_budget_ms=0.0)}]
)
def test_batch_without_time_limit_takes_all_requests(servable, options):
    rng = np.random.default_rng(11)
    engine = make_engine(servable, replace(CONFIG, **options))
    history = draw_history(rng, 12)
    with engine._condition:  # so that both pre-infer requests are queued together
        requests = [engine.submit_preinfer(user, history, 0, 3, timeout_s=TIMEOUT_S)[1] for user in "ab"]
    requests.append(engine.submit_rank("c", history, draw_candidates(rng, history), timeout_s=TIMEOUT_S))
    for request in requests:
        request.future.result(TIMEOUT_S)
    assert engine.is_alive
    engine.close()
    engine.tiers.device.check()


def fix_costs(monkeypatch):
    monkeypatch.setattr(EngineCostModel, "tokens_within", fixed_tokens_within)
    monkeypatch.setattr(
        EngineCostModel, "predict_s", lambda _costs, tokens, _pairs, steps=1.0: tokens * 1e-5 + steps * 1e-6
    )


class RowCountingRunner(ReferenceRunner):
    """Runner that records the number of rows of each batch."""

    def __init__(self, form, pool, row_step):
        super().__init__(form, pool)
        self.row_step = row_step
        self.rows = []

    def launch(self, parts):
        self.rows.append(sum(part.num_new for part in parts))
        return super().launch(parts)


def engine_with_row_step(row_step, **options):
    """Return an engine with capacity for long prefixes, and its runner."""
    encoder = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=1024)
    form = make_adapter(random_retrieval(encoder, num_items=200))
    pool = PagePool(encoder, num_pages=512, page_tokens=4, device=torch.device("cpu"), dtype=torch.float32)
    runner = RowCountingRunner(form, pool, row_step)
    cfg = replace(CONFIG, prefix_cache=replace(TIERS, device_bytes=1 << 20), **options)
    engine = Engine(form, cfg, runner=runner)
    runner.rows.clear()  # remove the batches of the warm-up
    return engine, runner


def test_preinfer_chunks_fill_multiples_of_row_step():
    engine, runner = engine_with_row_step(400, preinfer_chunk_ms=0.0)
    history = draw_history(np.random.default_rng(12), 1000)
    engine.submit_preinfer("a", history, 0, 3, timeout_s=1e9)[1].future.result(TIMEOUT_S)
    engine.close()
    assert runner.rows == [800, 199]


def test_engine_default_chunk_is_quarter_of_budget(monkeypatch):
    monkeypatch.setattr(EngineCostModel, "tokens_within", fixed_tokens_within)
    encoder = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=1024)
    servable = random_retrieval(encoder, num_items=200)
    history = draw_history(np.random.default_rng(13), 1000)
    batches = []
    for budget_ms in (1e6, 1e-6):
        trigger = replace(CONFIG.preinfer, latency_budget_ms=budget_ms)
        cfg = replace(CONFIG, prefix_cache=replace(TIERS, device_bytes=1 << 20), preinfer=trigger)
        engine = make_engine(servable, cfg)
        engine.submit_preinfer("a", history, 0, 3, timeout_s=1e9)[1].future.result(TIMEOUT_S)
        batches.append(engine.counts["batches"])
        engine.close()
    assert batches == [1, 4], "chunks of 256 tokens"


@pytest.mark.parametrize(("num_ranked", "chunk"), [(0, 768), (2, 512), (8, 256)])
def test_preinfer_fills_batches_without_starving(monkeypatch, num_ranked, chunk):
    fix_costs(monkeypatch)
    engine, runner = engine_with_row_step(1, preinfer_chunk_ms=10.0)
    rng = np.random.default_rng(14)
    ranked = draw_history(rng, 200)
    with engine._condition:  # so that one batch contains all requests
        requests = [engine.submit_preinfer("a", draw_history(rng, 999), 0, 3, timeout_s=1e9)[1]]
        requests += [
            engine.submit_rank(f"{user}", ranked, draw_candidates(rng, ranked, 10), timeout_s=1e9)
            for user in range(num_ranked)
        ]
    for request in requests:
        request.future.result(TIMEOUT_S)
    engine.close()
    assert runner.rows[0] == num_ranked * 210 + chunk


def test_preinfer_depends_on_saved_time(monkeypatch):
    fix_costs(monkeypatch)
    trigger = TriggerConfig(policy="at_risk", latency_budget_ms=0.0, min_gain=0.2)
    engine, _ = engine_with_row_step(1, preinfer=trigger)
    history = draw_history(np.random.default_rng(20), 101)
    reasons = {
        count: engine.submit_preinfer(f"{count}", history, 0, count, timeout_s=1e9)[0].reason for count in (380, 420)
    }
    assert reasons == {380: "admitted", 420: "short"}, "100 tokens of 481, and of 521"
    assert [engine.would_admit_preinfer(101, count).reason for count in (380, 420)] == ["history_required", "short"]
    engine.close()


def test_preinfer_batch_time_is_bounded(monkeypatch):
    fix_costs(monkeypatch)
    engine, runner = engine_with_row_step(1, preinfer_chunk_ms=4.0)
    rng = np.random.default_rng(17)
    with engine._condition:  # so that all are queued before the first batch
        lengths = enumerate((301, 301, 51))
        requests = [engine.submit_preinfer(f"{i}", draw_history(rng, n), 0, 3, timeout_s=1e9)[1] for i, n in lengths]
    for request in requests:
        request.future.result(TIMEOUT_S)
    engine.close()
    assert runner.rows[0] == 256, "the time limit allows 400 tokens: one chunk of 256, but not two"


def test_preinfer_waits_for_queued_ranking_requests():
    engine, runner = engine_with_row_step(400, max_batch_tokens=300, preinfer_chunk_ms=0.0)
    rng = np.random.default_rng(16)
    ranked = draw_history(rng, 200)
    with engine._condition:  # so that all are queued before the first batch
        requests = [engine.submit_preinfer("a", draw_history(rng, 101), 0, 3, timeout_s=1e9)[1]]
        requests += [
            engine.submit_rank(f"{i}", ranked, draw_candidates(rng, ranked, 10), timeout_s=1e9) for i in range(4)
        ]
    for request in requests:
        request.future.result(TIMEOUT_S)
    engine.close()
    assert runner.rows == [420, 420 + 100]


@pytest.mark.parametrize("direction", ["copy_out", "copy_in"])
def test_prefix_cache_failed_copy_loses_nothing(monkeypatch, direction, caplog):
    def fail(*_):
        raise MemoryError("no host memory")

    # One failure is logged once per process.
    monkeypatch.setattr("nestrec.serving.kv_cache.tiered_prefix_cache.FAILURES", Failures())
    rng = np.random.default_rng(15)
    servable = random_ranking(ENCODER, num_items=200)
    engine = make_engine(servable, replace(CONFIG, prefix_cache=replace(TIERS, keep_on_device=False)))
    with monkeypatch.context() as broken:
        broken.setattr(HostPages, direction, fail)
        for _ in range(3):
            history = draw_history(rng, 9)
            for _ in range(2):  # the second reads the prefix of the first
                candidates = draw_candidates(rng, history)
                result = engine.submit_rank("a", history, candidates, timeout_s=1e9).future.result(TIMEOUT_S)
                expected = oracle_scores(servable, history, candidates, engine.adapter.slide_events)
                assert np.abs(result.scores - expected).max() <= 1e-5
                wait_for_copies(engine)
    assert "failed; the prefix is dropped from the cache" in caplog.text
    assert engine.tiers.host_cache.num_bytes == sum(entry.num_bytes for entry in engine.tiers.host_cache.entries())
    result = engine.submit_rank("a", history, candidates, timeout_s=1e9).future.result(TIMEOUT_S)
    wait_for_copies(engine)
    result = engine.submit_rank("a", history, candidates, timeout_s=1e9).future.result(TIMEOUT_S)
    assert result.source == "host", "the next copy succeeds"
    assert np.abs(result.scores - expected).max() <= 1e-5
    engine.close()
    assert engine.tiers.device.num_free_pages == engine.tiers.device.num_pages


def test_prefix_reload_is_used_if_faster_than_prefill(monkeypatch):
    engine = make_engine(
        random_ranking(ENCODER, num_items=200),
        replace(CONFIG, prefix_cache=replace(TIERS, reload_policy="when_faster")),
    )
    tiers = engine.tiers
    monkeypatch.setattr(engine.costs, "predict_s", lambda *_: 1e-3)
    for copy_s, ahead_s, num_behind, is_faster in (
        (9e-4, 0.0, 0, True),
        (3e-3, 0.0, 0, False),
        (3e-3, 2.5e-3, 0, True),
        (3e-3, 0.0, 3, True),
        (3e-3, 0.0, 1, False),
    ):
        monkeypatch.setattr(tiers._in, "copy_s", lambda num_bytes, copy_s=copy_s: copy_s * (num_bytes > 0))
        assert tiers._is_copy_faster(8, ahead_s, num_behind) == is_faster
    engine.close()


def test_prefix_reload_cost_is_measured_at_start(monkeypatch):
    """An estimate that is too high would prevent all copies, and so would never be corrected."""
    cost_s = {"copy_in": 0.03, "copy_out": 0.02}
    for direction, seconds in cost_s.items():
        monkeypatch.setattr(HostPages, direction, lambda *_, seconds=seconds: time.sleep(seconds))
    engine = make_engine(
        random_ranking(ENCODER, num_items=200),
        replace(CONFIG, prefix_cache=replace(TIERS, reload_policy="when_faster")),
    )
    tiers = engine.tiers
    pages = min(32, engine.tiers.device.num_pages)
    for copier, seconds in ((tiers._in, cost_s["copy_in"]), (tiers._out, cost_s["copy_out"])):
        assert copier.copy_s(pages * tiers.pool.page_bytes) >= seconds
        assert copier.wait_s == 0.0
    assert len(tiers.host_cache.entries()) == tiers.host_cache.num_bytes == 0
    engine.close()


def test_prefix_reload_counts_as_host_hit():
    rng = np.random.default_rng(18)
    servable = random_ranking(ENCODER, num_items=200)
    engine = make_engine(servable)
    history = draw_history(rng, 9)

    def cache_source():
        result = engine.submit_rank("a", history, draw_candidates(rng, history), timeout_s=1e9).future.result(TIMEOUT_S)
        wait_for_copies(engine)
        return result.source

    assert cache_source() == "none"
    engine._post(lambda: engine.tiers.device.evict(engine._key("a")))
    engine.submit_preinfer("a", history, 0, 3, timeout_s=1e9)[1].future.result(TIMEOUT_S)
    assert [cache_source(), cache_source()] == ["host", "device"]
    assert (engine.counts["reloaded"], engine.counts["rank_host"]) == (1, 1)
    engine.close()


def test_prefix_reload_is_shared_by_later_request(monkeypatch):
    """A prefill in addition to the copy would write to the same pages."""
    rng = np.random.default_rng(18)
    servable = random_ranking(ENCODER, num_items=200)
    engine = make_engine(servable)
    history = draw_history(rng, 9)
    may_copy = threading.Event()
    copies = []
    copy_in = engine.tiers._host_pages.copy_in

    def wait_and_copy(pages, host_pages):
        copies.append(pages)
        assert may_copy.wait(TIMEOUT_S)
        copy_in(pages, host_pages)

    candidates = draw_candidates(rng, history)
    engine.submit_rank("a", history, candidates, timeout_s=1e9).future.result(TIMEOUT_S)
    wait_for_copies(engine)
    monkeypatch.setattr(engine.tiers._host_pages, "copy_in", wait_and_copy)
    engine._post(lambda: engine.tiers.device.evict(engine._key("a")))
    engine.submit_preinfer("a", history, 0, 3, timeout_s=1e9)
    end_s = time.perf_counter() + TIMEOUT_S
    while not copies and time.perf_counter() < end_s:
        time.sleep(0.001)
    ranked = engine.submit_rank("a", history, candidates, timeout_s=1e9)
    other = engine.submit_rank("b", draw_history(rng, 5), candidates, timeout_s=1e9)
    other.future.result(TIMEOUT_S)  # scheduled after the first
    assert not ranked.future.done()
    may_copy.set()
    result = ranked.future.result(TIMEOUT_S)
    assert (result.source, result.num_cached) == ("host", 18)
    engine.close()


def test_prefix_offload_copies_only_new_pages():
    rng = np.random.default_rng(19)
    servable = random_ranking(ENCODER, num_items=200)
    engine = make_engine(servable)
    history = draw_history(rng, 0)
    lengths = []
    for num_new in (9, 1, 4):
        history = extend_history(rng, history, num_new)
        engine.submit_rank("a", history, draw_candidates(rng, history), timeout_s=1e9).future.result(TIMEOUT_S)
        wait_for_copies(engine)
        lengths += [entry.length for entry in engine.tiers.host_cache.entries()]
    assert lengths == [18, 18, 28]
    engine.close()


def test_trigger_receives_host_times(servable):
    """The trigger gets the host time per batch, and the transit time of requests and results."""
    engine = make_engine(servable)
    history = draw_history(np.random.default_rng(20), 9)
    candidates = draw_candidates(np.random.default_rng(20), history)
    for number in range(16):
        sender = RequestSource("a", 1000, time.perf_counter() - 5.0, 2.0)
        engine.submit_rank(f"{number}", history, candidates, timeout_s=TIMEOUT_S, sender=sender).future.result(
            TIMEOUT_S
        )
    is_quiet = threading.Event()
    engine._post(is_quiet.set)  # runs after the last batch is complete
    assert is_quiet.wait(TIMEOUT_S)
    assert 7.0 <= engine.trigger.transit_s <= 10.0
    assert engine.pacer.host_s > 0
    with engine._condition:  # nothing is computed in this block
        request = engine.submit_rank("a", history, candidates, timeout_s=TIMEOUT_S)
        alone_s = engine._estimator.full_rank_s(request.tokens.length, len(candidates))
        assert engine.trigger._arrivals[-1][1] == pytest.approx(alone_s + engine.pacer.host_s)
    request.future.result(TIMEOUT_S)
    engine.close()


def wait_for_copies(engine):
    """Wait until all started copies have finished and the engine has processed their results."""
    end_s = time.perf_counter() + TIMEOUT_S
    while engine.tiers.host_cache._in_flight or engine._messages:
        assert time.perf_counter() < end_s
        time.sleep(1e-3)


def test_engine_full_queue_rejects_with_retry_after(servable):
    rng = np.random.default_rng(3)
    engine = make_engine(servable, replace(CONFIG, max_queue_delay_s=0.02))
    history = draw_history(rng, 20)
    retry_after_s = []
    requests = []
    with engine._condition:  # nothing is computed in this block
        for user in range(3000):
            try:
                requests.append(
                    engine.submit_rank(str(user), history, draw_candidates(rng, history, 50), timeout_s=TIMEOUT_S)
                )
            except OverloadedError as error:
                retry_after_s.append(error.retry_after_s)
    assert retry_after_s
    assert min(retry_after_s) > 0
    assert all(len(request.future.result(TIMEOUT_S).scores) == 50 for request in requests)
    engine.close()


def test_engine_skips_cancelled_and_late_requests(servable):
    rng = np.random.default_rng(4)
    clock = ManualClock()
    engine = make_engine(servable, clock=clock)
    history = draw_history(rng, 10)
    with engine._condition:  # nothing is scheduled in this block
        late = engine.submit_rank("a", history, draw_candidates(rng, history), timeout_s=1.0)
        cancelled = engine.submit_rank("b", history, draw_candidates(rng, history), timeout_s=9.0)
        cancelled.future.cancel()
        clock.sleep(2.0)
    with pytest.raises(UnavailableError):
        late.future.result(TIMEOUT_S)
    assert engine.drain(TIMEOUT_S)
    with pytest.raises(CancelledError):
        cancelled.future.result(TIMEOUT_S)
    assert engine.counts.get("batches", 0) == 0
    assert engine.counts["cancelled"] == engine.counts["shed_deadline"] == 1
    engine.close()


def test_engine_drain_finishes_accepted_requests(servable):
    rng = np.random.default_rng(5)
    engine = make_engine(servable)
    history = draw_history(rng, 10)
    requests = [
        engine.submit_rank(str(u), history, draw_candidates(rng, history), timeout_s=TIMEOUT_S) for u in range(100)
    ]
    assert engine.drain(TIMEOUT_S)
    assert all(request.future.done() for request in requests)
    with pytest.raises(UnavailableError):
        engine.submit_rank("a", history, draw_candidates(rng, history), timeout_s=TIMEOUT_S)
    engine.close()


def test_engine_failed_batch_leaks_no_page(servable, monkeypatch):
    rng = np.random.default_rng(6)
    engine = make_engine(servable)
    history = draw_history(rng, 10)
    launch = engine._runner.launch
    launched = []

    def fail_first(parts):
        launched.append(parts)
        return launch(parts) if len(launched) > 1 else 1 / 0

    monkeypatch.setattr(engine._runner, "launch", fail_first)
    with pytest.raises(RuntimeError, match="failed"):
        engine.submit_rank("a", history, draw_candidates(rng, history), timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    result = engine.submit_rank("a", history, draw_candidates(rng, history), timeout_s=TIMEOUT_S).future.result(
        TIMEOUT_S
    )
    assert result.source == "none"
    engine.close()
    engine.tiers.device.check()


def test_prefix_erased_during_batch_is_not_offloaded(servable, monkeypatch):
    rng = np.random.default_rng(8)
    engine = make_engine(servable)
    history = draw_history(rng, 10)
    launch = engine._runner.launch

    def launch_and_forget(parts):
        engine.forget("a")
        return launch(parts)

    monkeypatch.setattr(engine._runner, "launch", launch_and_forget)
    engine.submit_rank("a", history, draw_candidates(rng, history), timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    assert engine.tiers.device.entries() == engine.tiers.host_cache.entries() == []
    engine.close()
    engine.tiers.device.check()


def test_prefix_erased_during_reload_is_no_hit(servable, monkeypatch):
    rng = np.random.default_rng(22)
    engine = make_engine(servable)
    history = draw_history(rng, 10)
    host = engine.tiers._host_pages
    copy_in = host.copy_in
    is_evicted = threading.Event()

    def forget_and_copy(pages, host_pages):
        engine.forget("a")
        copy_in(pages, host_pages)

    def evict_from_device():
        engine.tiers.device.evict(engine.tiers.device.entries()[0].key)
        is_evicted.set()

    monkeypatch.setattr(host, "copy_in", forget_and_copy)
    engine.submit_rank("a", history, draw_candidates(rng, history), timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    engine.tiers._out._pool.submit(lambda: engine._post(evict_from_device))  # runs after the copy to host memory
    assert is_evicted.wait(TIMEOUT_S)
    result = engine.submit_rank("a", history, draw_candidates(rng, history), timeout_s=TIMEOUT_S).future.result(
        TIMEOUT_S
    )
    assert engine.counts["reloaded"] == 1
    assert (result.source, result.num_cached) == ("none", 0)
    engine.close()
    engine.tiers.device.check()


def test_prefix_reload_without_free_pages_is_no_hit(servable):
    rng = np.random.default_rng(21)
    engine = make_engine(servable, replace(CONFIG, prefix_cache=replace(TIERS, device_bytes=1)))
    history = draw_history(rng, 10)
    for _ in range(2):
        result = engine.submit_rank("a", history, draw_candidates(rng, history), timeout_s=TIMEOUT_S).future.result(
            TIMEOUT_S
        )
        assert (result.source, result.num_cached) == ("none", 0)
    engine.close()
    engine.tiers.device.check()


def test_prefix_cache_disabled_computes_requests_in_full(servable):
    rng = np.random.default_rng(7)
    engine = make_engine(servable, replace(CONFIG, prefix_cache=replace(TIERS, enabled=False)))
    history = draw_history(rng, 10)
    for _ in range(2):
        result = engine.submit_rank("a", history, draw_candidates(rng, history), timeout_s=TIMEOUT_S).future.result(
            TIMEOUT_S
        )
        assert (result.source, result.num_cached) == ("none", 0)
    engine.close()
