"""Random operations of a few users on engines: append, extend, slide, evict, offload, reload, expire, forget, swap."""

import contextlib
import random

import numpy as np

from nestrec.serving.core.rejections import UnavailableError
from nestrec.serving.model.request_inputs import Candidates, History
from nestrec_bench.harness.clocks import ManualClock

TIMEOUT_S = 60.0


def draw_history(rng, length):
    return History(
        items=rng.integers(1, 200, length),
        times_ms=np.sort(rng.integers(0, 10**10, length)),
        actions=rng.integers(0, 4, length),
        features={"event_tab": rng.integers(0, 3, length)},
    )


def draw_candidates(rng, history, count=3):
    now_ms = int(history.times_ms[-1] if len(history) else 0) + int(rng.integers(0, 10**8))
    return Candidates(
        items=rng.integers(0, 200, count), now_ms=now_ms, features={"event_tab": rng.integers(0, 3, count)}
    )


def extend_history(rng, history, count):
    """Return a history with random events added at its end."""
    start = int(history.times_ms[-1]) if len(history) else 0
    more = draw_history(rng, count)
    return History(
        items=np.append(history.items, more.items),
        times_ms=np.append(history.times_ms, start + more.times_ms),
        actions=np.append(history.actions, more.actions),
        features={"event_tab": np.append(history.features["event_tab"], more.features["event_tab"])},
    )


class Sequences:
    """A random sequence of operations on one engine at a time.

    Subclasses create the engine of the current model (`make_engine`) and check each response (`check`).

    Args:
        seed: Seed of all operations.
    """

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.py = random.Random(seed)
        self.clock = ManualClock()
        self.current = 0
        self.engine = self.make_engine()
        self.history = [draw_history(self.rng, int(self.rng.integers(0, 20))) for _ in range(6)]
        self.sources = {"none": 0, "device": 0, "host": 0}

    def make_engine(self):
        raise NotImplementedError

    def check(self, history, candidates, answer):
        raise NotImplementedError

    def run(self, num_operations):
        """Run random operations and close the engine."""
        actions = [self.rank] * 4 + [self.append] * 2 + [self.preinfer, self.change, self.wait, self.forget, self.swap]
        for _ in range(num_operations):
            self.py.choice(actions)()
        self.engine.close()

    def rank(self):
        user = self.py.randrange(6)
        history = self.history[user]
        candidates = draw_candidates(self.rng, history)
        answer = self.engine.submit_rank(str(user), history, candidates, timeout_s=1e9).future.result(TIMEOUT_S)
        self.sources[answer.source] += 1
        self.check(history, candidates, answer)

    def append(self):
        user = self.py.randrange(6)
        self.history[user] = extend_history(self.rng, self.history[user], self.py.choice([1, 1, 2, 5]))

    def change(self):
        """Change an event in the middle of a history, as an event that arrives late does."""
        history = self.history[self.py.randrange(6)]
        if len(history):
            history.items[self.py.randrange(len(history))] = self.rng.integers(1, 200)

    def preinfer(self):
        user = self.py.randrange(6)
        _, work = self.engine.submit_preinfer(str(user), self.history[user], 0, 3, timeout_s=1e9)
        if work is not None and self.py.random() < 0.5:
            with contextlib.suppress(UnavailableError):  # all pages may be reserved for requests that will follow
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
            self.engine = self.make_engine()
