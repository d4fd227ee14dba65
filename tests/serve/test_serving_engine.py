"""The engine: cached scores are the scores of full inference, whatever happened to the cache."""

import math
import threading
import time
from concurrent.futures import CancelledError
from dataclasses import replace

import numpy as np
import pytest
import torch
from serving_oracle import oracle_scores
from serving_sequences import Sequences, appended, draw_candidates, draw_history

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
from nestrec.serving.model.model_adapter import make_form
from nestrec_bench.harness.clocks import ManualClock
from nestrec_bench.harness.random_model import random_ranking, random_retrieval

SIZES = {"dim": 16, "num_layers": 2, "num_heads": 2, "max_length": 32}
ENCODER = HSTUConfig(**SIZES, head_dim=8, time_bias=True)
ENCODERS = (
    ENCODER,
    replace(ENCODER, time_encoding="functional", attention=AttentionSpanConfig(window=7, prefix=3)),
    replace(ENCODER, num_layers=3, attention=AttentionSpanConfig(window=9, keep_last=8, keep_step=6)),
    FuXiConfig(**SIZES, head_dim=8, ffn_dim=16, attention=AttentionSpanConfig(window=9)),
    SASRecConfig(**SIZES, ffn_dim=16),
)
TIERS = PrefixCacheConfig(
    cache_bytes=3 << 13, dram_bytes=1 << 15, page_tokens=4, spill_above=0.0, cache_ttl_s=90.0, reload="always"
)
CONFIG = EngineConfig(tiers=TIERS, max_queue_s=1e9, trigger=TriggerConfig(policy="all", burst_s=1e9))
MODELS = {"retrieval": random_retrieval, "ranking": random_ranking}
SLIDE = 4
TIMEOUT_S = 60.0


def make_engine(servable, cfg=CONFIG, clock=None, slide_events=None):
    return Engine(make_form(servable, slide_events), cfg, clock=clock)


@pytest.fixture(params=list(MODELS))
def servable(request):
    return MODELS[request.param](replace(ENCODER), num_items=200)


class CachedAgainstUncached(Sequences):
    """Two models that take turns; the oracle is the model of training."""

    def __init__(self, make_model, seed):
        encoder = ENCODERS[seed % len(ENCODERS)]
        self.models = [make_model(encoder, num_items=200, seed=s) for s in range(2)]
        self.worst = 0.0
        super().__init__(seed)

    def make_engine(self):
        return make_engine(self.models[self.current], clock=self.clock, slide_events=SLIDE)

    def check(self, history, candidates, answer):
        model = self.models[self.current]
        assert answer.version == model.version
        if len(history) or "event_tab" in model.tables:
            expected = oracle_scores(model, history, candidates, SLIDE)
            error = float(np.abs(answer.scores - expected).max() / max(1.0, np.abs(expected).max()))
            self.worst = max(self.worst, error)


NUM_SHARDS, SHARD = 20, 250
SHARDS = [pytest.param(s * SHARD, SHARD, 40, id=f"shard{s}", marks=pytest.mark.slow) for s in range(NUM_SHARDS)]
"""With two kinds of model, 10,000 sequences; cut so that several processes can share them."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize(("first", "num_sequences", "length"), [pytest.param(0, 12, 60, id="some"), *SHARDS])
def test_cached_scores_equal_uncached_ones_over_random_sequences(kind, first, num_sequences, length, capsys):
    """Append, extend, slide, evict, spill, reload, expire, forget, change and swap, against the training-time model."""
    worst = 0.0
    sources = {"none": 0, "device": 0, "dram": 0}
    for seed in range(first, first + num_sequences):
        sequences = CachedAgainstUncached(MODELS[kind], seed)
        sequences.run(length)
        worst = max(worst, sequences.worst)
        sources = {name: count + sequences.sources[name] for name, count in sources.items()}
    with capsys.disabled():
        print(f"\n{kind}: {num_sequences} sequences, largest difference {worst:.1e}, prefixes from {sources}")
    assert worst <= 1e-5
    assert min(sources.values()) > 0


def test_prefixes_of_8_bits_change_scores_a_little_and_take_half_the_bytes():
    model = random_ranking(ENCODER, num_items=200, dtype=torch.bfloat16)
    scores = []
    held = []
    for prefix_dtype in ("model", "fp8"):
        engine = make_engine(model, replace(CONFIG, prefix_dtype=prefix_dtype))
        rng = np.random.default_rng(1)
        history = draw_history(rng, 15)
        engine.preinfer("a", history, 0, 3, timeout_s=TIMEOUT_S)[1].future.result(TIMEOUT_S)
        asked = draw_candidates(rng, history, 50)
        answer = engine.rank("a", history, asked, timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
        assert answer.source == "device"
        scores.append(answer.scores)
        held.append(engine.tiers.device.num_pages)
        engine.close()
    assert 0 < np.abs(scores[1] - scores[0]).max() <= 0.05 * np.abs(scores[0]).max()
    assert held[1] >= 1.6 * held[0]  # heads of 8 numbers: their powers of two weigh more than those of 128


def test_a_history_that_changes_while_it_is_computed_leaves_no_wrong_prefix(servable, monkeypatch):
    rng = np.random.default_rng(3)
    history = draw_history(rng, 12)
    engine = make_engine(servable)
    launch = engine._runner.launch

    def launch_and_change(parts):
        launched = launch(parts)
        history.items[0] = history.items[0] % 199 + 1
        return launched

    monkeypatch.setattr(engine._runner, "launch", launch_and_change)
    engine.preinfer("a", history, 0, 3, timeout_s=TIMEOUT_S)[1].future.result(TIMEOUT_S)
    monkeypatch.setattr(engine._runner, "launch", launch)
    candidates = draw_candidates(rng, history)
    answer = engine.rank("a", history, candidates, timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    expected = oracle_scores(servable, history, candidates, engine.form.slide_events)
    assert np.abs(answer.scores - expected).max() <= 1e-5 * max(1.0, np.abs(expected).max())
    engine.close()


def test_a_prefix_is_used_and_only_the_rest_computed(servable):
    rng = np.random.default_rng(1)
    history = draw_history(rng, 12)
    engine = make_engine(servable)
    candidates = draw_candidates(rng, history)
    engine.preinfer("a", history, 0, 3, timeout_s=TIMEOUT_S)[1].future.result(TIMEOUT_S)
    answer = engine.rank("a", history, candidates, timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    assert answer.source == "device"
    assert answer.num_cached == engine.form.tokens(history, 0).num_cacheable
    longer = appended(rng, history, 2)
    again = engine.rank("a", longer, draw_candidates(rng, longer), timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    assert again.num_cached == answer.num_cached
    other = engine.rank("b", history, candidates, timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    assert other.source == "none"
    assert np.abs(other.scores - answer.scores).max() <= 1e-5 * max(1.0, np.abs(other.scores).max())
    engine.close()


def test_many_requests_at_once_are_batched_and_all_answered(servable):
    rng = np.random.default_rng(2)
    engine = make_engine(servable)
    asked = []
    for _ in range(40):
        history = draw_history(rng, int(rng.integers(1, 40)))
        asked.append((history, draw_candidates(rng, history)))
    with engine._condition:  # so that all of them are there at the first batch
        works = [engine.rank(str(u % 7), *pair, timeout_s=TIMEOUT_S) for u, pair in enumerate(asked)]
    for work, (history, candidates) in zip(works, asked, strict=True):
        expected = oracle_scores(servable, history, candidates, engine.form.slide_events)
        assert np.abs(work.future.result(TIMEOUT_S).scores - expected).max() <= 1e-5 * max(1.0, np.abs(expected).max())
    assert engine.counts["batches"] < 40
    assert engine.queued_s == 0.0
    engine.close()


class LateDevice(ReferenceRunner):
    """Batches end a while after they were launched."""

    depth = 2

    def launch(self, parts):
        results = self.run(parts)
        ends_s = time.perf_counter() + 0.01

        def wait():
            time.sleep(max(0.0, ends_s - time.perf_counter()))
            return results, 0.01

        return InFlightBatch(wait, lambda: time.perf_counter() >= ends_s)


def test_an_answer_comes_when_its_batch_ends_however_late_it_was_expected(monkeypatch):
    monkeypatch.setattr(EngineCostModel, "predict_s", lambda self, *work, **options: 30.0)
    form = make_form(random_ranking(ENCODER, num_items=200))
    pool = PagePool(ENCODER, num_pages=32, page_tokens=4, device=torch.device("cpu"), dtype=torch.float32)
    engine = Engine(form, CONFIG, runner=LateDevice(form, pool))
    rng = np.random.default_rng(9)
    history = draw_history(rng, 10)
    candidates = draw_candidates(rng, history)
    start_s = time.perf_counter()
    works = [engine.rank(str(user), history, candidates, timeout_s=1e9) for user in range(3)]
    answers = [work.future.result(TIMEOUT_S) for work in works]
    assert time.perf_counter() - start_s < 25.0
    expected = oracle_scores(form.servable, history, candidates, form.slide_events)
    assert max(np.abs(answer.scores - expected).max() for answer in answers) <= 1e-5
    assert all(work.planned_s >= start_s and work.launched_s >= work.planned_s for work in works)
    engine.close()


@pytest.mark.parametrize("most_seen", [(), (7, 32)])
def test_cost_model_tokens_within_is_total_and_monotonic(most_seen):
    costs = EngineCostModel(most_seen=most_seen, pair_s=1e-3)
    seconds = [-math.inf, -1e300, -1.0, 0.0, 5e-324, 1e-9, 1e-3, 1.0, 1e300, math.inf]
    for prefix in (0, 5, 10**6):
        counts = [costs.tokens_within(each, prefix) for each in seconds]
        assert counts == sorted(counts)
        assert counts[:4] == [0] * 4
        assert counts[-1] > 10**6


def known_cost(_costs, seconds, _prefix):
    """Tokens at ten microseconds each: what so small a model costs a token is lost in the noise."""
    return int(min(seconds, 1e9) / 1e-5)


def test_signals_are_cut_by_time_where_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(EngineCostModel, "tokens_within", known_cost)
    encoder = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=1024)
    servable = random_retrieval(encoder, num_items=200)
    rng = np.random.default_rng(10)
    history = draw_history(rng, 1000)
    batches = {}
    for chunk_ms in (0.0, 1e-6):
        tiers = replace(TIERS, cache_bytes=1 << 20)
        engine = make_engine(servable, replace(CONFIG, tiers=tiers, chunk_ms=chunk_ms))
        engine.preinfer("a", history, 0, 3, timeout_s=1e9)[1].future.result(TIMEOUT_S)
        batches[chunk_ms] = engine.counts["batches"]
        candidates = draw_candidates(rng, history)
        answer = engine.rank("a", history, candidates, timeout_s=1e9).future.result(TIMEOUT_S)
        assert answer.num_cached == 999
        expected = oracle_scores(servable, history, candidates, engine.form.slide_events)
        assert np.abs(answer.scores - expected).max() <= 1e-5 * max(1.0, np.abs(expected).max())
        engine.close()
    assert batches == {0.0: 1, 1e-6: 4}, "pieces of 256 tokens"


@pytest.mark.parametrize("options", [{"chunk_ms": 0.0}, {"trigger": replace(CONFIG.trigger, budget_ms=0.0)}])
def test_batches_without_a_time_limit_take_all_that_waits(servable, options):
    rng = np.random.default_rng(11)
    engine = make_engine(servable, replace(CONFIG, **options))
    history = draw_history(rng, 12)
    with engine._condition:  # both signals wait together
        works = [engine.preinfer(user, history, 0, 3, timeout_s=TIMEOUT_S)[1] for user in "ab"]
    works.append(engine.rank("c", history, draw_candidates(rng, history), timeout_s=TIMEOUT_S))
    for work in works:
        work.future.result(TIMEOUT_S)
    assert engine.is_alive
    engine.close()
    engine.tiers.device.check()


def know_costs(monkeypatch):
    monkeypatch.setattr(EngineCostModel, "tokens_within", known_cost)
    monkeypatch.setattr(
        EngineCostModel, "predict_s", lambda _costs, tokens, _pairs, steps=1.0: tokens * 1e-5 + steps * 1e-6
    )


class InSteps(ReferenceRunner):
    """Remembers how many rows its batches had."""

    def __init__(self, form, pool, row_step):
        super().__init__(form, pool)
        self.row_step = row_step
        self.rows = []

    def launch(self, parts):
        self.rows.append(sum(part.num_new for part in parts))
        return super().launch(parts)


def engine_in_steps(row_step, **options):
    """An engine with room for long prefixes, and its runner."""
    encoder = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=1024)
    form = make_form(random_retrieval(encoder, num_items=200))
    pool = PagePool(encoder, num_pages=512, page_tokens=4, device=torch.device("cpu"), dtype=torch.float32)
    runner = InSteps(form, pool, row_step)
    cfg = replace(CONFIG, tiers=replace(TIERS, cache_bytes=1 << 20), **options)
    engine = Engine(form, cfg, runner=runner)
    runner.rows.clear()  # of the warm-up
    return engine, runner


def test_chunks_end_where_a_batch_has_whole_steps_of_rows():
    engine, runner = engine_in_steps(400, chunk_ms=0.0)
    history = draw_history(np.random.default_rng(12), 1000)
    engine.preinfer("a", history, 0, 3, timeout_s=1e9)[1].future.result(TIMEOUT_S)
    engine.close()
    assert runner.rows == [800, 199]


def test_a_chunk_takes_a_quarter_of_the_budget_of_ranking_unless_told_otherwise(monkeypatch):
    monkeypatch.setattr(EngineCostModel, "tokens_within", known_cost)
    encoder = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=1024)
    servable = random_retrieval(encoder, num_items=200)
    history = draw_history(np.random.default_rng(13), 1000)
    batches = []
    for budget_ms in (1e6, 1e-6):
        trigger = replace(CONFIG.trigger, budget_ms=budget_ms)
        cfg = replace(CONFIG, tiers=replace(TIERS, cache_bytes=1 << 20), trigger=trigger)
        engine = make_engine(servable, cfg)
        engine.preinfer("a", history, 0, 3, timeout_s=1e9)[1].future.result(TIMEOUT_S)
        batches.append(engine.counts["batches"])
        engine.close()
    assert batches == [1, 4], "pieces of 256 tokens"


@pytest.mark.parametrize(("num_ranked", "chunk"), [(0, 768), (2, 512), (8, 256)])
def test_signals_fill_a_batch_up_to_a_time_and_starve_beside_no_number_of_requests(monkeypatch, num_ranked, chunk):
    know_costs(monkeypatch)
    (engine, runner) = engine_in_steps(1, chunk_ms=10.0)
    rng = np.random.default_rng(14)
    ranked = draw_history(rng, 200)
    with engine._condition:  # so that one batch has it all
        works = [engine.preinfer("a", draw_history(rng, 999), 0, 3, timeout_s=1e9)[1]]
        works += [
            engine.rank(f"{user}", ranked, draw_candidates(rng, ranked, 10), timeout_s=1e9)
            for user in range(num_ranked)
        ]
    for work in works:
        work.future.result(TIMEOUT_S)
    engine.close()
    assert runner.rows[0] == num_ranked * 210 + chunk


def test_what_a_prefix_saves_of_a_request_decides_whether_it_is_worth_a_signal(monkeypatch):
    know_costs(monkeypatch)
    trigger = TriggerConfig(policy="at_risk", budget_ms=0.0, least_gain=0.2)
    engine, _ = engine_in_steps(1, trigger=trigger)
    history = draw_history(np.random.default_rng(20), 101)
    asked = {count: engine.preinfer(f"{count}", history, 0, count, timeout_s=1e9)[0].reason for count in (380, 420)}
    assert asked == {380: "admitted", 420: "short"}, "100 tokens of 481, and of 521"
    assert [engine.foresee(101, count).reason for count in (380, 420)] == ["wanted", "short"]
    engine.close()


def test_a_batch_takes_no_second_signal_that_there_is_no_time_for(monkeypatch):
    know_costs(monkeypatch)
    (engine, runner) = engine_in_steps(1, chunk_ms=4.0)
    rng = np.random.default_rng(17)
    with engine._condition:  # so that all of it is there at the first batch
        lengths = enumerate((301, 301, 51))
        works = [engine.preinfer(f"{i}", draw_history(rng, n), 0, 3, timeout_s=1e9)[1] for i, n in lengths]
    for work in works:
        work.future.result(TIMEOUT_S)
    engine.close()
    assert runner.rows[0] == 256, "400 tokens are in time: 256 of the first, and not another 256"


def test_signals_wait_while_requests_are_left_for_the_next_batch():
    (engine, runner) = engine_in_steps(400, max_batch_tokens=300, chunk_ms=0.0)
    rng = np.random.default_rng(16)
    ranked = draw_history(rng, 200)
    with engine._condition:  # so that all of it is there at the first batch
        works = [engine.preinfer("a", draw_history(rng, 101), 0, 3, timeout_s=1e9)[1]]
        works += [engine.rank(f"{i}", ranked, draw_candidates(rng, ranked, 10), timeout_s=1e9) for i in range(4)]
    for work in works:
        work.future.result(TIMEOUT_S)
    engine.close()
    assert runner.rows == [420, 420 + 100]


@pytest.mark.parametrize("direction", ["copy_out", "copy_in"])
def test_a_copy_that_fails_loses_no_request_and_no_memory(monkeypatch, direction, caplog):
    def fail(*_):
        raise MemoryError("no host memory")

    # One failure is logged once per process.
    monkeypatch.setattr("nestrec.serving.kv_cache.tiered_prefix_cache.FAILURES", Failures())
    rng = np.random.default_rng(15)
    servable = random_ranking(ENCODER, num_items=200)
    engine = make_engine(servable, replace(CONFIG, tiers=replace(TIERS, keeps_on_device=False)))
    with monkeypatch.context() as broken:
        broken.setattr(HostPages, direction, fail)
        for _ in range(3):
            history = draw_history(rng, 9)
            for _ in range(2):  # the second asks for what the first has left
                candidates = draw_candidates(rng, history)
                answer = engine.rank("a", history, candidates, timeout_s=1e9).future.result(TIMEOUT_S)
                expected = oracle_scores(servable, history, candidates, engine.form.slide_events)
                assert np.abs(answer.scores - expected).max() <= 1e-5
                wait_for_copies(engine)
    assert "failed; the prefix is forgotten" in caplog.text
    assert engine.tiers.dram.num_bytes == sum(kept.num_bytes for kept in engine.tiers.dram.entries())
    answer = engine.rank("a", history, candidates, timeout_s=1e9).future.result(TIMEOUT_S)
    wait_for_copies(engine)
    answer = engine.rank("a", history, candidates, timeout_s=1e9).future.result(TIMEOUT_S)
    assert answer.source == "dram", "the next copy is made"
    assert np.abs(answer.scores - expected).max() <= 1e-5
    engine.close()
    assert engine.tiers.device.num_free_pages == engine.tiers.device.num_pages


def test_a_copy_is_worth_it_where_it_is_sooner_than_computing_counting_those_who_wait(monkeypatch):
    engine = make_engine(random_ranking(ENCODER, num_items=200), replace(CONFIG, tiers=replace(TIERS, reload="worth")))
    tiers = engine.tiers
    monkeypatch.setattr(engine.costs, "predict_s", lambda *_: 1e-3)
    for copy_s, ahead_s, behind, is_worth in (
        (9e-4, 0.0, 0, True),
        (3e-3, 0.0, 0, False),
        (3e-3, 2.5e-3, 0, True),
        (3e-3, 0.0, 3, True),
        (3e-3, 0.0, 1, False),
    ):
        monkeypatch.setattr(tiers._in, "copy_s", lambda num_bytes, copy_s=copy_s: copy_s * (num_bytes > 0))
        assert tiers._is_copy_worth(8, ahead_s, behind) == is_worth
    engine.close()


def test_what_copies_cost_is_known_before_the_first_is_chosen(monkeypatch):
    """An estimate that is too high would have no copy made, and so never be corrected."""
    cost_s = {"copy_in": 0.03, "copy_out": 0.02}
    for direction, seconds in cost_s.items():
        monkeypatch.setattr(HostPages, direction, lambda *_, seconds=seconds: time.sleep(seconds))
    engine = make_engine(random_ranking(ENCODER, num_items=200), replace(CONFIG, tiers=replace(TIERS, reload="worth")))
    tiers = engine.tiers
    pages = min(32, engine.tiers.device.num_pages)
    for copier, seconds in ((tiers._in, cost_s["copy_in"]), (tiers._out, cost_s["copy_out"])):
        assert copier.copy_s(pages * tiers.pool.page_bytes) >= seconds
        assert copier.wait_s == 0.0
    assert len(tiers.dram.entries()) == tiers.dram.num_bytes == 0
    engine.close()


def test_what_a_signal_has_brought_back_from_dram_counts_as_found_there_by_the_first_request_that_reads_it():
    rng = np.random.default_rng(18)
    servable = random_ranking(ENCODER, num_items=200)
    engine = make_engine(servable)
    history = draw_history(rng, 9)

    def ranked():
        answer = engine.rank("a", history, draw_candidates(rng, history), timeout_s=1e9).future.result(TIMEOUT_S)
        wait_for_copies(engine)
        return answer.source

    assert ranked() == "none"
    engine._post(lambda: engine.tiers.device.drop(engine._key("a")))
    engine.preinfer("a", history, 0, 3, timeout_s=1e9)[1].future.result(TIMEOUT_S)
    assert [ranked(), ranked()] == ["dram", "device"]
    assert (engine.counts["reloaded"], engine.counts["rank_dram"]) == (1, 1)
    engine.close()


def test_who_comes_while_a_signal_brings_the_prefix_back_from_dram_waits_for_that_copy(monkeypatch):
    """Computing it as well would write to the pages that the copy writes to."""
    rng = np.random.default_rng(18)
    servable = random_ranking(ENCODER, num_items=200)
    engine = make_engine(servable)
    history = draw_history(rng, 9)
    may_copy = threading.Event()
    copies = []
    copy_in = engine.tiers._host.copy_in

    def copied_later(pages, held):
        copies.append(pages)
        assert may_copy.wait(TIMEOUT_S)
        copy_in(pages, held)

    candidates = draw_candidates(rng, history)
    engine.rank("a", history, candidates, timeout_s=1e9).future.result(TIMEOUT_S)
    wait_for_copies(engine)
    monkeypatch.setattr(engine.tiers._host, "copy_in", copied_later)
    engine._post(lambda: engine.tiers.device.drop(engine._key("a")))
    engine.preinfer("a", history, 0, 3, timeout_s=1e9)
    end_s = time.perf_counter() + TIMEOUT_S
    while not copies and time.perf_counter() < end_s:
        time.sleep(0.001)
    ranked = engine.rank("a", history, candidates, timeout_s=1e9)
    other = engine.rank("b", draw_history(rng, 5), candidates, timeout_s=1e9)
    other.future.result(TIMEOUT_S)  # planned after it
    assert not ranked.future.done()
    may_copy.set()
    answer = ranked.future.result(TIMEOUT_S)
    assert (answer.source, answer.num_cached) == ("dram", 18)
    engine.close()


def test_a_few_more_events_do_not_have_the_whole_prefix_copied_to_dram_again():
    rng = np.random.default_rng(19)
    servable = random_ranking(ENCODER, num_items=200)
    engine = make_engine(servable)
    history = draw_history(rng, 0)
    kept = []
    for num_new in (9, 1, 4):
        history = appended(rng, history, num_new)
        engine.rank("a", history, draw_candidates(rng, history), timeout_s=1e9).future.result(TIMEOUT_S)
        wait_for_copies(engine)
        kept += [entry.length for entry in engine.tiers.dram.entries()]
    assert kept == [18, 18, 28]
    engine.close()


def test_the_trigger_hears_what_requests_take_beside_the_device(servable):
    """The host's part of a batch, and the way of a request to the engine and of an answer back."""
    engine = make_engine(servable)
    history = draw_history(np.random.default_rng(20), 9)
    candidates = draw_candidates(np.random.default_rng(20), history)
    for number in range(16):
        sender = RequestSource("a", 1000, time.perf_counter() - 5.0, 2.0)
        engine.rank(f"{number}", history, candidates, timeout_s=TIMEOUT_S, sender=sender).future.result(TIMEOUT_S)
    is_quiet = threading.Event()
    engine._post(is_quiet.set)  # all of the last batch is done before it
    assert is_quiet.wait(TIMEOUT_S)
    assert 7.0 <= engine.trigger.way_s <= 10.0
    assert engine.pace.host_s > 0
    with engine._condition:  # nothing is computed meanwhile
        work = engine.rank("a", history, candidates, timeout_s=TIMEOUT_S)
        alone_s = engine._outlook.full_rank_s(work.tokens.length, len(candidates))
        assert engine.trigger._offered[-1][1] == pytest.approx(alone_s + engine.pace.host_s)
    work.future.result(TIMEOUT_S)
    engine.close()


def wait_for_copies(engine):
    """Until everything that was begun has ended and been told to the engine."""
    end_s = time.perf_counter() + TIMEOUT_S
    while engine.tiers.dram._in_flight or engine._messages:
        assert time.perf_counter() < end_s
        time.sleep(1e-3)


def test_a_full_queue_refuses_and_says_when_to_come_back(servable):
    rng = np.random.default_rng(3)
    engine = make_engine(servable, replace(CONFIG, max_queue_s=0.02))
    history = draw_history(rng, 20)
    refused, works = [], []
    with engine._condition:  # nothing is computed meanwhile
        for user in range(3000):
            try:
                works.append(engine.rank(str(user), history, draw_candidates(rng, history, 50), timeout_s=TIMEOUT_S))
            except OverloadedError as error:
                refused.append(error.retry_after_s)
    assert refused
    assert min(refused) > 0
    assert all(len(work.future.result(TIMEOUT_S).scores) == 50 for work in works)
    engine.close()


def test_cancelled_and_late_requests_are_not_computed(servable):
    rng = np.random.default_rng(4)
    clock = ManualClock()
    engine = make_engine(servable, clock=clock)
    history = draw_history(rng, 10)
    with engine._condition:  # nothing is planned meanwhile
        late = engine.rank("a", history, draw_candidates(rng, history), timeout_s=1.0)
        cancelled = engine.rank("b", history, draw_candidates(rng, history), timeout_s=9.0)
        cancelled.future.cancel()
        clock.sleep(2.0)
    with pytest.raises(UnavailableError):
        late.future.result(TIMEOUT_S)
    assert engine.drain(TIMEOUT_S)
    with pytest.raises(CancelledError):
        cancelled.future.result(TIMEOUT_S)
    assert engine.counts.get("batches", 0) == 0
    assert engine.counts["cancelled"] == engine.counts["refused_deadline"] == 1
    engine.close()


def test_draining_finishes_what_was_accepted_and_refuses_the_rest(servable):
    rng = np.random.default_rng(5)
    engine = make_engine(servable)
    history = draw_history(rng, 10)
    works = [engine.rank(str(u), history, draw_candidates(rng, history), timeout_s=TIMEOUT_S) for u in range(100)]
    assert engine.drain(TIMEOUT_S)
    assert all(work.future.done() for work in works)
    with pytest.raises(UnavailableError):
        engine.rank("a", history, draw_candidates(rng, history), timeout_s=TIMEOUT_S)
    engine.close()


def test_a_batch_that_fails_answers_with_an_error_and_leaks_no_page(servable, monkeypatch):
    rng = np.random.default_rng(6)
    engine = make_engine(servable)
    history = draw_history(rng, 10)
    launch = engine._runner.launch
    launched = []

    def fail_the_first(parts):
        launched.append(parts)
        return launch(parts) if len(launched) > 1 else 1 / 0

    monkeypatch.setattr(engine._runner, "launch", fail_the_first)
    with pytest.raises(RuntimeError, match="failed"):
        engine.rank("a", history, draw_candidates(rng, history), timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    answer = engine.rank("a", history, draw_candidates(rng, history), timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    assert answer.source == "none"
    engine.close()
    engine.tiers.device.check()


def test_what_is_forgotten_while_a_batch_computes_with_it_is_not_copied_to_dram_afterwards(servable, monkeypatch):
    rng = np.random.default_rng(8)
    engine = make_engine(servable)
    history = draw_history(rng, 10)
    launch = engine._runner.launch

    def launch_and_forget(parts):
        engine.forget("a")
        return launch(parts)

    monkeypatch.setattr(engine._runner, "launch", launch_and_forget)
    engine.rank("a", history, draw_candidates(rng, history), timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    assert engine.tiers.device.entries() == engine.tiers.dram.entries() == []
    engine.close()
    engine.tiers.device.check()


def test_a_prefix_that_was_forgotten_on_its_way_back_is_not_told_as_found(servable, monkeypatch):
    rng = np.random.default_rng(22)
    engine = make_engine(servable)
    history = draw_history(rng, 10)
    host = engine.tiers._host
    copy_in = host.copy_in
    has_left = threading.Event()

    def forget_and_copy(pages, held):
        engine.forget("a")
        copy_in(pages, held)

    def leave_the_device():
        engine.tiers.device.drop(engine.tiers.device.entries()[0].key)
        has_left.set()

    monkeypatch.setattr(host, "copy_in", forget_and_copy)
    engine.rank("a", history, draw_candidates(rng, history), timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    engine.tiers._out._pool.submit(lambda: engine._post(leave_the_device))  # after the copy to DRAM
    assert has_left.wait(TIMEOUT_S)
    answer = engine.rank("a", history, draw_candidates(rng, history), timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    assert engine.counts["reloaded"] == 1
    assert (answer.source, answer.num_cached) == ("none", 0)
    engine.close()
    engine.tiers.device.check()


def test_a_prefix_that_there_is_no_room_for_is_not_told_as_found(servable):
    rng = np.random.default_rng(21)
    engine = make_engine(servable, replace(CONFIG, tiers=replace(TIERS, cache_bytes=1)))
    history = draw_history(rng, 10)
    for _ in range(2):
        answer = engine.rank("a", history, draw_candidates(rng, history), timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
        assert (answer.source, answer.num_cached) == ("none", 0)
    engine.close()
    engine.tiers.device.check()


def test_without_prefixes_every_request_is_computed_in_full(servable):
    rng = np.random.default_rng(7)
    engine = make_engine(servable, replace(CONFIG, tiers=replace(TIERS, keeps_prefix=False)))
    history = draw_history(rng, 10)
    for _ in range(2):
        answer = engine.rank("a", history, draw_candidates(rng, history), timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
        assert (answer.source, answer.num_cached) == ("none", 0)
    engine.close()
