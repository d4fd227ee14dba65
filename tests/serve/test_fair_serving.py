"""A long request cannot hold an engine: it is computed in pieces, and others go between them."""

import itertools
import random
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from front_processes import wait_for
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
from nestrec.serving.model.model_adapter import make_form
from nestrec_bench.harness.random_model import random_ranking, random_retrieval

ENCODER = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=256, time_bias=True)
MODELS = {"retrieval": random_retrieval, "ranking": random_ranking}
TOKEN_S = 1e-5
PAGE_BYTES = 256
CONFIG = EngineConfig(
    tiers=PrefixCacheConfig(cache_bytes=PAGE_BYTES << 8, dram_bytes=0, page_tokens=4), chunk_ms=0.2, max_queue_s=0.1
)
TIMEOUT_S = 60.0


class Recording(ReferenceRunner):
    """Remembers the rows of its batches."""

    def __init__(self, form, pool):
        super().__init__(form, pool)
        self.rows = []

    def launch(self, parts):
        self.rows.append([part.num_new for part in parts])
        return super().launch(parts)


@pytest.fixture(params=list(MODELS))
def servable(request, monkeypatch):
    """Ten microseconds a token, since what so small a model costs is lost in noise, and pieces as small as can be."""
    monkeypatch.setattr(batch_scheduler, "FEWEST_TOKENS", 16)
    monkeypatch.setattr(batch_scheduler, "_FEWEST_CANDIDATES", 4)
    monkeypatch.setattr(EngineCostModel, "tokens_within", lambda _, seconds, _prefix: int(seconds / TOKEN_S))
    predicted = lambda _, tokens, _pairs, steps=1.0: tokens * TOKEN_S + steps * 1e-6  # noqa: E731
    monkeypatch.setattr(EngineCostModel, "predict_s", predicted)
    return MODELS[request.param](ENCODER, num_items=200)


class Late(Recording):
    """A device on which a batch ends while the next one is there already: after some looks, however long they take."""

    depth = 2

    def launch(self, parts):
        launched = super().launch(parts)
        looks = itertools.count()
        return InFlightBatch(launched.wait, lambda: next(looks) >= 20)


def make_engine(servable, cfg=CONFIG, kind=Recording):
    form = make_form(servable, None)
    pool = PagePool(
        ENCODER,
        num_pages=cfg.tiers.cache_bytes // PAGE_BYTES,
        page_tokens=4,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    runner = kind(form, pool)
    engine = Engine(form, cfg, runner=runner)
    runner.rows.clear()  # of the warm-up
    return engine, runner


def check(servable, engine, history, candidates, answer):
    expected = oracle_scores(servable, history, candidates, engine.form.slide_events)
    assert np.abs(answer.scores - expected).max() <= 1e-5 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize(("budget_ms", "is_cut"), [(2.2, False), (1.6, True)])
def test_a_request_is_cut_only_where_it_takes_half_of_the_budget(servable, budget_ms, is_cut):
    """Of about a millisecond. Pieces of a quarter of the budget would cost more than it does as a whole."""
    cfg = replace(CONFIG, chunk_ms=None, trigger=TriggerConfig(budget_ms=budget_ms))
    engine, runner = make_engine(servable, cfg)
    rng = np.random.default_rng(0)
    history = draw_history(rng, 96 // engine.form.tokens_an_event)
    candidates = draw_candidates(rng, history, 4)
    engine.rank("u", history, candidates, timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    engine.close()
    assert (len(runner.rows) > 1) == is_cut


@pytest.mark.parametrize("kind", [Recording, Late])
def test_a_long_request_is_computed_in_pieces_with_the_scores_of_the_whole(servable, kind):
    engine, runner = make_engine(servable, kind=kind)
    rng = np.random.default_rng(1)
    history = draw_history(rng, 60)
    candidates = draw_candidates(rng, history, 26)
    answer = engine.rank("a", history, candidates, timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    check(servable, engine, history, candidates, answer)
    assert (answer.source, answer.num_cached) == ("none", 0), "what it has computed itself does not count as found"
    assert answer.items.tolist() == candidates.items.tolist()
    pieces = [rows for (rows,) in runner.rows]
    assert sum(pieces) == engine.form.tokens(history, 0).length + 26
    assert pieces[:3] == [16] * 3
    most = 16 if engine.form.appends_candidates else 60  # candidates that are no tokens go with the last event
    assert max(pieces) <= most + 4
    again = engine.rank("a", history, candidates, timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    assert again.source == "device"
    engine.close()
    engine.tiers.device.check()
    assert all(entry.pins == 0 for entry in engine.tiers.device.entries())


@pytest.mark.parametrize("is_one_client", [True, False])
def test_short_requests_are_admitted_beside_long_ones_and_answered_before_them(servable, is_one_client):
    """More work waits than may: by its own share each short one is in time all the same."""
    engine, runner = make_engine(servable, replace(CONFIG, max_queue_s=0.0015))
    rng = np.random.default_rng(2)
    done = []
    long, short = draw_history(rng, 60), draw_history(rng, 3)
    with engine._condition:  # nothing is computed meanwhile
        works = [
            engine.rank("hog", long, draw_candidates(rng, long, 150), timeout_s=TIMEOUT_S, sender=RequestSource("h"))
        ]
        with pytest.raises(OverloadedError):
            engine.rank("hog2", long, draw_candidates(rng, long, 900), timeout_s=TIMEOUT_S, sender=RequestSource("h"))
        for number in range(10):
            sender = RequestSource("h" if is_one_client else f"s{number % 4}")
            work = engine.rank(f"{number}", short, draw_candidates(rng, short), timeout_s=TIMEOUT_S, sender=sender)
            works.append(work)
        for number, work in enumerate(works):
            work.future.add_done_callback(lambda _, number=number: done.append(number))
    for work in works:
        work.future.result(TIMEOUT_S)
    assert done[-1] == 0, "the long one is answered last"
    at_once = 0 if engine.form.appends_candidates else 150  # candidates that are no tokens cost nothing worth a piece
    assert max(map(sum, runner.rows)) <= 20 + at_once + 10 * 9, "no batch is long"
    assert engine.queued_s == 0.0
    engine.close()


def test_one_request_may_wait_behind_a_batch_that_is_longer_than_the_queue(servable):
    """Else the device would be idle from the end of the batch until somebody comes."""
    engine, runner = make_engine(servable, replace(CONFIG, chunk_ms=0, max_queue_s=1e-4))
    rng = np.random.default_rng(2)
    begun = threading.Event()
    go_on = threading.Event()
    history = draw_history(rng, 20)
    launch = runner.launch

    def launch_slowly(parts):
        begun.set()
        assert go_on.wait(TIMEOUT_S)
        return launch(parts)

    def rank(user, timeout_s=TIMEOUT_S):
        return engine.rank(user, history, draw_candidates(rng, history, 8), timeout_s=timeout_s, sender=sender)

    runner.launch = launch_slowly
    sender = RequestSource("", 1000)
    works = [rank("a")]
    assert begun.wait(TIMEOUT_S)
    assert not engine.is_full_for(sender)
    with pytest.raises(OverloadedError):
        rank("too late", timeout_s=1e-4)
    works.append(rank("b"))
    assert engine.is_full_for(sender)
    with pytest.raises(OverloadedError):
        rank("c")
    go_on.set()
    assert all(len(work.future.result(TIMEOUT_S).scores) == 8 for work in works)
    engine.close()


@pytest.mark.parametrize("busy_share", [0.1, 1.0])
def test_the_next_batch_waits_for_the_last_one_where_the_host_is_what_is_slow(servable, busy_share, monkeypatch):
    """Then it holds more requests. A device that is busy gets its next batch before the one before it has ended."""
    monkeypatch.setattr(BatchPacer, "worked", lambda *_: None)
    engine, runner = make_engine(servable, replace(CONFIG, max_batch_requests=1), kind=Late)
    engine.pace.busy_share = busy_share
    rng = np.random.default_rng(5)
    launch = runner.launch
    under_way = []
    history = draw_history(rng, 3)

    def counted(parts):
        under_way.append(len(engine._in_flight))
        return launch(parts)

    runner.launch = counted
    with engine._condition:
        works = [engine.rank(str(u), history, draw_candidates(rng, history), timeout_s=TIMEOUT_S) for u in range(8)]
    for work in works:
        work.future.result(TIMEOUT_S)
    engine.close()
    assert len(under_way) == 8
    assert max(under_way) == (busy_share > 0.5)


def test_a_long_request_that_is_given_up_leaves_nothing_behind(servable):
    engine, runner = make_engine(servable)
    rng = np.random.default_rng(3)
    history = draw_history(rng, 60)
    launch = runner.launch
    work = None

    def cancel_in_the_middle(parts):
        if len(runner.rows) == 1:
            work.future.cancel()
        return launch(parts)

    runner.launch = cancel_in_the_middle
    with engine._condition:
        work = engine.rank("a", history, draw_candidates(rng, history, 8), timeout_s=TIMEOUT_S)
    assert engine.wait_until_idle(TIMEOUT_S)
    assert sum(map(sum, runner.rows)) == 32, "two pieces, and then nobody wanted the rest"
    entries = engine.tiers.device.entries  # the second piece may still be on its way
    wait_for(lambda: all(entry.held_until_s == float("-inf") and entry.pins == 0 for entry in entries()))
    assert engine.counts["cancelled"] == 1
    candidates = draw_candidates(rng, history, 8)
    answer = engine.rank("a", history, candidates, timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    check(servable, engine, history, candidates, answer)
    assert answer.num_cached == 32
    engine.close()


def test_without_room_in_the_cache_the_rest_is_computed_at_once(servable):
    engine, runner = make_engine(servable, replace(CONFIG, tiers=replace(CONFIG.tiers, cache_bytes=6 * PAGE_BYTES)))
    rng = np.random.default_rng(4)
    history = draw_history(rng, 60)
    candidates = draw_candidates(rng, history, 26)
    answer = engine.rank("a", history, candidates, timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    check(servable, engine, history, candidates, answer)
    assert len(runner.rows) == 2
    engine.close()
    engine.tiers.device.check()


@pytest.mark.parametrize("kind", [Recording, Late])
def test_requests_in_pieces_are_exact_whoever_else_asks(servable, kind):
    """One user from two clients with two histories, small caches, forgetting in the middle."""
    cfg = replace(CONFIG, max_queue_s=1e9, tiers=replace(CONFIG.tiers, cache_bytes=40 * PAGE_BYTES))
    engine, _ = make_engine(servable, cfg, kind)
    rng = np.random.default_rng(5)
    py = random.Random(5)
    histories = [draw_history(rng, length) for length in (60, 50, 5, 20, 2)]
    asked = []
    for _ in range(30):
        history = py.choice(histories)
        candidates = draw_candidates(rng, history, py.choice([1, 8, 20]))
        sender = RequestSource(py.choice("ab"))
        asked.append(
            (history, candidates, engine.rank(py.choice("uv"), history, candidates, timeout_s=1e9, sender=sender))
        )
        if py.random() < 0.2:
            engine.forget("u")
    for history, candidates, work in asked:
        check(servable, engine, history, candidates, work.future.result(TIMEOUT_S))
    assert engine.drain(TIMEOUT_S)
    engine.close()
    engine.tiers.device.check()
    assert all(entry.pins == 0 for entry in engine.tiers.device.entries())


def test_a_piece_that_fails_fails_its_request_and_no_other(servable):
    engine, runner = make_engine(servable)
    rng = np.random.default_rng(6)
    history = draw_history(rng, 60)
    launch = runner.launch

    def fail_the_second(parts):
        launched = launch(parts)
        if len(runner.rows) == 2:
            raise ValueError("made to fail")
        return launched

    runner.launch = fail_the_second
    work = engine.rank("a", history, draw_candidates(rng, history, 8), timeout_s=TIMEOUT_S)
    with pytest.raises((RuntimeError, UnavailableError)):
        work.future.result(TIMEOUT_S)
    candidates = draw_candidates(rng, history, 8)
    answer = engine.rank("a", history, candidates, timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    check(servable, engine, history, candidates, answer)
    assert engine.drain(TIMEOUT_S)
    engine.close()
