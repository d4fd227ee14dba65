"""The engine: cached scores are the scores of full inference, whatever happened to the cache."""

import contextlib
import random
from concurrent.futures import CancelledError
from dataclasses import replace

import numpy as np
import pytest
from serving_oracle import oracle_scores

from nestrec.base.clock import SimulatedClock
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.engine import Engine, EngineConfig
from nestrec.serving.forms import make_form
from nestrec.serving.inputs import Candidates, History
from nestrec.serving.random_model import random_ranking, random_retrieval
from nestrec.serving.tiers import TiersConfig
from nestrec.serving.trigger import TriggerConfig
from nestrec.serving.work import OverloadedError, UnavailableError

ENCODER = HSTUConfig(dim=16, num_layers=2, num_heads=2, head_dim=8, max_length=32, time_bias=True)
TIERS = TiersConfig(cache_bytes=3 << 13, dram_bytes=1 << 15, page_tokens=4, spill_above=0.0, cache_ttl_s=90.0)
CONFIG = EngineConfig(tiers=TIERS, max_queue_s=1e9, trigger=TriggerConfig(policy="all", burst_s=1e9))
MODELS = {"retrieval": random_retrieval, "ranking": random_ranking}
TIMEOUT_S = 60.0


def draw_history(rng, length):
    return History(
        items=rng.integers(1, 200, length), times_ms=np.sort(rng.integers(0, 10**10, length)),
        actions=rng.integers(0, 4, length), features={"event_tab": rng.integers(0, 3, length)},
    )  # fmt: skip


def draw_candidates(rng, history, count=3):
    now_ms = int(history.times_ms[-1] if len(history) else 0) + int(rng.integers(0, 10**8))
    return Candidates(
        items=rng.integers(0, 200, count), now_ms=now_ms, features={"event_tab": rng.integers(0, 3, count)}
    )


def appended(rng, history, count):
    start = int(history.times_ms[-1]) if len(history) else 0
    more = draw_history(rng, count)
    return History(
        items=np.append(history.items, more.items), times_ms=np.append(history.times_ms, start + more.times_ms),
        actions=np.append(history.actions, more.actions),
        features={"event_tab": np.append(history.features["event_tab"], more.features["event_tab"])},
    )  # fmt: skip


def make_engine(servable, cfg=CONFIG, clock=None, slide_events=None):
    return Engine(make_form(servable, slide_events), cfg, clock=clock)


@pytest.fixture(params=list(MODELS))
def servable(request):
    return MODELS[request.param](replace(ENCODER), num_items=200)


class Sequences:
    """Random requests of a few users through engines that share a simulated clock."""

    def __init__(self, make_model, seed):
        self.rng, self.py = np.random.default_rng(seed), random.Random(seed)
        self.clock = SimulatedClock()
        self.models = [make_model(ENCODER, num_items=200, seed=s) for s in range(2)]
        self.slide = 4
        self.current = 0
        self.engine = make_engine(self.models[0], clock=self.clock, slide_events=self.slide)
        self.history = [draw_history(self.rng, int(self.rng.integers(0, 20))) for _ in range(6)]
        self.worst = 0.0
        self.sources = {"none": 0, "device": 0, "dram": 0}

    def run(self, num_operations):
        actions = [self.rank] * 4 + [self.append] * 2 + [self.preinfer, self.change, self.wait, self.forget, self.swap]
        for _ in range(num_operations):
            self.py.choice(actions)()
        self.engine.close()

    def rank(self):
        user = self.py.randrange(6)
        history = self.history[user]
        candidates = draw_candidates(self.rng, history)
        answer = self.engine.rank(str(user), history, candidates, timeout_s=1e9).future.result(TIMEOUT_S)
        self.sources[answer.source] += 1
        if len(history) or "event_tab" in self.models[0].tables:
            model = self.models[self.current]
            assert answer.version == model.version
            expected = oracle_scores(model, history, candidates, self.slide)
            self.worst = max(
                self.worst, float(np.abs(answer.scores - expected).max() / max(1.0, np.abs(expected).max()))
            )

    def append(self):
        user = self.py.randrange(6)
        self.history[user] = appended(self.rng, self.history[user], self.py.choice([1, 1, 2, 5]))

    def change(self):
        """A late event: somewhere inside the history something is different now."""
        history = self.history[self.py.randrange(6)]
        if len(history):
            history.items[self.py.randrange(len(history))] = self.rng.integers(1, 200)

    def preinfer(self):
        user = self.py.randrange(6)
        _, work = self.engine.preinfer(str(user), self.history[user], 0, 3, timeout_s=1e9)
        if work is not None and self.py.random() < 0.5:
            with contextlib.suppress(UnavailableError):  # no room: others are held for requests on their way
                work.future.result(TIMEOUT_S)

    def wait(self):
        self.clock.sleep(self.py.choice([1.0, 100.0, 601.0]))

    def forget(self):
        self.engine.forget(str(self.py.randrange(6)))

    def swap(self):
        if self.py.random() < 0.3:
            self.engine.drain(TIMEOUT_S)
            self.engine.close()
            self.current = 1 - self.current
            self.engine = make_engine(self.models[self.current], clock=self.clock, slide_events=self.slide)


@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize(("num_sequences", "length"), [(40, 60), pytest.param(5000, 40, marks=pytest.mark.slow)])
def test_cached_scores_equal_uncached_ones_over_random_sequences(kind, num_sequences, length, capsys):
    """Append, extend, slide, evict, spill, reload, expire, forget, change and swap, against the training-time model."""
    worst, sources = 0.0, {"none": 0, "device": 0, "dram": 0}
    for seed in range(num_sequences):
        sequences = Sequences(MODELS[kind], seed)
        sequences.run(length)
        worst = max(worst, sequences.worst)
        sources = {name: count + sequences.sources[name] for name, count in sources.items()}
    with capsys.disabled():
        print(f"\n{kind}: largest difference {worst:.1e}, prefixes from {sources}")
    assert worst <= 1e-5
    assert min(sources.values()) > 0


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
    works = [engine.rank(str(u % 7), *pair, timeout_s=TIMEOUT_S) for u, pair in enumerate(asked)]
    for work, (history, candidates) in zip(works, asked, strict=True):
        expected = oracle_scores(servable, history, candidates, engine.form.slide_events)
        assert np.abs(work.future.result(TIMEOUT_S).scores - expected).max() <= 1e-5 * max(1.0, np.abs(expected).max())
    assert engine.counts["batches"] < 40
    assert engine.queued_s == 0.0
    engine.close()


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
    clock = SimulatedClock()
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
    run = engine._runner.launch
    monkeypatch.setattr(engine._runner, "launch", lambda parts: 1 / 0)
    with pytest.raises(RuntimeError, match="failed"):
        engine.rank("a", history, draw_candidates(rng, history), timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    monkeypatch.setattr(engine._runner, "launch", run)
    answer = engine.rank("a", history, draw_candidates(rng, history), timeout_s=TIMEOUT_S).future.result(TIMEOUT_S)
    assert answer.source == "none"
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
