"""Fair scheduling: a long request is computed in chunks, and requests of others run between them."""

import itertools
import random
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from frontend_processes import wait_for
from serving_oracle import oracle_scores
from serving_sequences import draw_candidates, draw_history

from nestrec.models.hstu import HSTUConfig
from nestrec.serving.core.cost_model import EngineCostModel
from nestrec.serving.core.rejections import OverloadedError, UnavailableError
from nestrec.serving.core.request_limits import RequestSource
from nestrec.serving.engine import batch_scheduler
from nestrec.serving.engine.batch_pacer import BatchPacer
from nestrec.serving.engine.batch_scheduler import EngineConfig
from nestrec.serving.engine.reference_runner import InFlightBatch, ReferenceRunner
from nestrec.serving.engine.serving_engine import Engine
from nestrec.serving.kv_cache.kv_page_pool import PagePool
from nestrec.serving.kv_cache.preinfer_trigger import TriggerConfig
from nestrec.serving.kv_cache.tiered_prefix_cache import PrefixCacheConfig
from nestrec.serving.model.model_adapter import make_adapter
from nestrec_bench.harness.random_model import random_ranking, random_retrieval

ENCODER = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=256, time_bias=True)
MODELS = {"retrieval": random_retrieval, "ranking": random_ranking}
TOKEN_S = 1e-5
PAGE_BYTES = 256
CONFIG = EngineConfig(
    prefix_cache=PrefixCacheConfig(device_bytes=PAGE_BYTES << 8, host_bytes=0, page_tokens=4),
    preinfer_chunk_ms=0.2,
    max_queue_delay_s=0.1,
)
TIMEOUT_S = 60.0


class RecordingRunner(ReferenceRunner):
    """Runner that records the number of new tokens per item of each batch in `rows`."""

    def __init__(self, adapter, pool):
        super().__init__(adapter, pool)
        self.rows = []

    def launch(self, items):
        self.rows.append([item.num_new for item in items])
        return super().launch(items)


@pytest.fixture(params=list(MODELS))
def servable(request, monkeypatch):
    """Return a model with a fixed cost of ten microseconds per token and with the smallest chunks.

    The measured cost of so small a model would be dominated by noise.
    """
    monkeypatch.setattr(batch_scheduler, "MIN_CHUNK_TOKENS", 16)
    monkeypatch.setattr(batch_scheduler, "_MIN_CANDIDATES", 4)
    monkeypatch.setattr(EngineCostModel, "tokens_within", lambda _, seconds, _prefix: int(seconds / TOKEN_S))
    predicted = lambda _, tokens, _pairs, steps=1.0: tokens * TOKEN_S + steps * 1e-6  # noqa: E731
    monkeypatch.setattr(EngineCostModel, "predict_s", predicted)
    return MODELS[request.param](ENCODER, num_items=200)


class DelayedRunner(RecordingRunner):
    """Runner with two batches in flight; a batch ends after 20 polls, when the next one has already been launched."""

    depth = 2

    def launch(self, items):
        launched = super().launch(items)
        polls = itertools.count()
        return InFlightBatch(launched.wait, lambda: next(polls) >= 20)


def make_engine(servable, cfg=CONFIG, runner_class=RecordingRunner):
    adapter = make_adapter(servable, None)
    pool = PagePool(
        ENCODER,
        num_pages=cfg.prefix_cache.device_bytes // PAGE_BYTES,
        page_tokens=4,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    runner = runner_class(adapter, pool)
    engine = Engine(adapter, cfg, runner=runner)
    runner.rows.clear()  # drop the batches of the warm-up
    return engine, runner


def check_scores(servable, engine, history, candidates, result):
    expected = oracle_scores(servable, history, candidates, engine.adapter.slide_events)
    assert np.abs(result.scores - expected).max() <= 1e-5 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize(("budget_ms", "is_chunked"), [(2.2, False), (1.6, True)])
def test_chunked_prefill_starts_at_half_of_the_budget(servable, budget_ms, is_chunked):
    """A request of about one millisecond is computed at once if that is less than half of the budget.

    Chunks of a quarter of the budget would then cost more than the undivided request.
    """
    cfg = replace(CONFIG, preinfer_chunk_ms=None, preinfer=TriggerConfig(latency_budget_ms=budget_ms))
    engine, runner = make_engine(servable, cfg)
    rng = np.random.default_rng(0)
    history = draw_history(rng, 96 // engine.adapter.tokens_per_event)
    candidates = draw_candidates(rng, history, 4)
    engine.submit_rank("u", history, candidates, timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    engine.close()
    assert (len(runner.rows) > 1) == is_chunked


@pytest.mark.parametrize("runner_class", [RecordingRunner, DelayedRunner])
def test_chunked_prefill_scores_equal_full_prefill(servable, runner_class):
    engine, runner = make_engine(servable, runner_class=runner_class)
    rng = np.random.default_rng(1)
    history = draw_history(rng, 60)
    candidates = draw_candidates(rng, history, 26)
    result = engine.submit_rank("a", history, candidates, timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    check_scores(servable, engine, history, candidates, result)
    assert (result.source, result.num_cached) == ("none", 0), "its own chunks do not count as cached"
    assert result.items.tolist() == candidates.items.tolist()
    chunks = [rows for (rows,) in runner.rows]
    assert sum(chunks) == engine.adapter.tokens(history, 0).length + 26
    assert chunks[:3] == [16] * 3
    # Candidates of a retrieval model are not tokens; they are scored with the last event.
    max_tokens = 16 if engine.adapter.appends_candidates else 60
    assert max(chunks) <= max_tokens + 4
    again = engine.submit_rank("a", history, candidates, timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    assert again.source == "device"
    engine.close()
    engine.tiers.device.check()
    assert all(entry.pins == 0 for entry in engine.tiers.device.entries())


@pytest.mark.parametrize("is_one_client", [True, False])
def test_short_requests_overtake_long_ones(servable, is_one_client):
    """The queue is longer than allowed, but each short request is within the share of its client."""
    engine, runner = make_engine(servable, replace(CONFIG, max_queue_delay_s=0.0015))
    rng = np.random.default_rng(2)
    done = []
    long = draw_history(rng, 60)
    short = draw_history(rng, 3)
    with engine._condition:  # the engine computes nothing meanwhile
        requests = [
            engine.submit_rank(
                "long", long, draw_candidates(rng, long, 150), timeout_s=TIMEOUT_S, sender=RequestSource("h")
            )
        ]
        with pytest.raises(OverloadedError):
            engine.submit_rank(
                "long2", long, draw_candidates(rng, long, 900), timeout_s=TIMEOUT_S, sender=RequestSource("h")
            )
        for number in range(10):
            sender = RequestSource("h" if is_one_client else f"s{number % 4}")
            request = engine.submit_rank(
                f"{number}", short, draw_candidates(rng, short), timeout_s=TIMEOUT_S, sender=sender
            )
            requests.append(request)
        for number, request in enumerate(requests):
            request.future.add_done_callback(lambda _, number=number: done.append(number))
    for request in requests:
        request.future.result(TIMEOUT_S)
    assert done[-1] == 0, "the long request ends last"
    # Candidates of a retrieval model are not tokens: they are too cheap to be split into chunks.
    num_unsplit = 0 if engine.adapter.appends_candidates else 150
    assert max(map(sum, runner.rows)) <= 20 + num_unsplit + 10 * 9, "all batches are short"
    assert engine.queued_s == 0.0
    engine.close()


def test_admission_allows_one_request_after_long_batch(servable):
    """Otherwise the device would be idle from the end of the batch until the next request arrives."""
    engine, runner = make_engine(servable, replace(CONFIG, preinfer_chunk_ms=0, max_queue_delay_s=1e-4))
    rng = np.random.default_rng(2)
    started = threading.Event()
    resume = threading.Event()
    history = draw_history(rng, 20)
    launch = runner.launch

    def launch_when_resumed(items):
        started.set()
        assert resume.wait(TIMEOUT_S)
        return launch(items)

    def rank(user, timeout_s=TIMEOUT_S):
        return engine.submit_rank(user, history, draw_candidates(rng, history, 8), timeout_s=timeout_s, sender=sender)

    runner.launch = launch_when_resumed
    sender = RequestSource("", 1000)
    requests = [rank("a")]
    assert started.wait(TIMEOUT_S)
    assert not engine.is_overloaded_for(sender)
    with pytest.raises(OverloadedError):
        rank("too late", timeout_s=1e-4)
    requests.append(rank("b"))
    assert engine.is_overloaded_for(sender)
    with pytest.raises(OverloadedError):
        rank("c")
    resume.set()
    assert all(len(request.future.result(TIMEOUT_S).scores) == 8 for request in requests)
    engine.close()


@pytest.mark.parametrize("busy_fraction", [0.1, 1.0])
def test_batching_waits_if_host_is_the_bottleneck(servable, busy_fraction, monkeypatch):
    """Batches that wait contain more requests. A busy device gets its next batch before the previous one has ended."""
    monkeypatch.setattr(BatchPacer, "observe_device_time", lambda *_: None)
    engine, runner = make_engine(servable, replace(CONFIG, max_batch_requests=1), DelayedRunner)
    engine.pacer.busy_fraction = busy_fraction
    rng = np.random.default_rng(5)
    launch = runner.launch
    num_in_flight = []
    history = draw_history(rng, 3)

    def launch_and_count(items):
        num_in_flight.append(len(engine._in_flight))
        return launch(items)

    runner.launch = launch_and_count
    with engine._condition:
        requests = [
            engine.submit_rank(str(u), history, draw_candidates(rng, history), timeout_s=TIMEOUT_S) for u in range(8)
        ]
    for request in requests:
        request.future.result(TIMEOUT_S)
    engine.close()
    assert len(num_in_flight) == 8
    assert max(num_in_flight) == (busy_fraction > 0.5)


def test_chunked_prefill_cancelled_request_leaks_nothing(servable):
    engine, runner = make_engine(servable)
    rng = np.random.default_rng(3)
    history = draw_history(rng, 60)
    launch = runner.launch
    request = None

    def cancel_after_first_chunk(items):
        if len(runner.rows) == 1:
            request.future.cancel()
        return launch(items)

    runner.launch = cancel_after_first_chunk
    with engine._condition:
        request = engine.submit_rank("a", history, draw_candidates(rng, history, 8), timeout_s=TIMEOUT_S)
    assert engine.wait_until_idle(TIMEOUT_S)
    assert sum(map(sum, runner.rows)) == 32, "two chunks were computed before the request was cancelled"
    entries = engine.tiers.device.entries  # the second chunk may still be in flight
    wait_for(lambda: all(entry.reserved_until_s == float("-inf") and entry.pins == 0 for entry in entries()))
    assert engine.counts["cancelled"] == 1
    candidates = draw_candidates(rng, history, 8)
    result = engine.submit_rank("a", history, candidates, timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    check_scores(servable, engine, history, candidates, result)
    assert result.num_cached == 32
    engine.close()


def test_chunked_prefill_stops_chunking_if_cache_is_full(servable):
    engine, runner = make_engine(
        servable, replace(CONFIG, prefix_cache=replace(CONFIG.prefix_cache, device_bytes=6 * PAGE_BYTES))
    )
    rng = np.random.default_rng(4)
    history = draw_history(rng, 60)
    candidates = draw_candidates(rng, history, 26)
    result = engine.submit_rank("a", history, candidates, timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    check_scores(servable, engine, history, candidates, result)
    assert len(runner.rows) == 2
    engine.close()
    engine.tiers.device.check()


@pytest.mark.parametrize("runner_class", [RecordingRunner, DelayedRunner])
def test_chunked_prefill_is_exact_under_concurrency(servable, runner_class):
    """Two users have requests from two clients with several histories, in a small cache, and one user is forgotten."""
    cfg = replace(
        CONFIG, max_queue_delay_s=1e9, prefix_cache=replace(CONFIG.prefix_cache, device_bytes=40 * PAGE_BYTES)
    )
    engine, _ = make_engine(servable, cfg, runner_class)
    rng = np.random.default_rng(5)
    py = random.Random(5)
    histories = [draw_history(rng, length) for length in (60, 50, 5, 20, 2)]
    submitted = []
    for _ in range(30):
        history = py.choice(histories)
        candidates = draw_candidates(rng, history, py.choice([1, 8, 20]))
        sender = RequestSource(py.choice("ab"))
        request = engine.submit_rank(py.choice("uv"), history, candidates, timeout_s=1e9, sender=sender)
        submitted.append((history, candidates, request))
        if py.random() < 0.2:
            engine.forget("u")
    for history, candidates, request in submitted:
        check_scores(servable, engine, history, candidates, request.future.result(TIMEOUT_S))
    assert engine.drain(TIMEOUT_S)
    engine.close()
    engine.tiers.device.check()
    assert all(entry.pins == 0 for entry in engine.tiers.device.entries())


def test_chunked_prefill_failure_affects_one_request(servable):
    engine, runner = make_engine(servable)
    rng = np.random.default_rng(6)
    history = draw_history(rng, 60)
    launch = runner.launch

    def fail_at_second_chunk(items):
        launched = launch(items)
        if len(runner.rows) == 2:
            raise ValueError("injected")
        return launched

    runner.launch = fail_at_second_chunk
    request = engine.submit_rank("a", history, draw_candidates(rng, history, 8), timeout_s=TIMEOUT_S)
    with pytest.raises((RuntimeError, UnavailableError)):
        request.future.result(TIMEOUT_S)
    candidates = draw_candidates(rng, history, 8)
    result = engine.submit_rank("a", history, candidates, timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    check_scores(servable, engine, history, candidates, result)
    assert engine.drain(TIMEOUT_S)
    engine.close()
