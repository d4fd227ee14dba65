"""The load of `nestrec bench relay`: users who come, some of whom come back with a few more events."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from nestrec.bench.open_loop import Trial, poisson_arrivals, run_open_loop
from nestrec.bench.relay_modes import Mode
from nestrec.serving.engine import Engine
from nestrec.serving.inputs import Candidates, History
from nestrec.serving.work import RefusedError

NUM_ITEMS = 10_000
_BANK = 1 << 20
_NOW_MS = 2 * 10**10
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A user's history is a function of the user and the visit."""

    history: int
    """events at the first visit"""
    candidates: int
    returning: float
    """share of requests of users who were here before"""
    new_events: int = 4
    """between two visits"""
    recent_users: int = 64
    """a returning user is one of so many latest ones"""
    signal_s: float = 0.15
    """from signal to ranking request"""
    duration_s: float = 8.0
    seed: int = 0

    def visits(self, count: int) -> list[tuple[int, int]]:
        """(user, visit) of each request."""
        rng = np.random.default_rng(self.seed)
        recent: OrderedDict[int, int] = OrderedDict()  # latest users, oldest first, and how often they were here
        visits: list[tuple[int, int]] = []
        for number in range(count):
            user = number
            if recent and rng.random() < self.returning:
                user = list(recent)[int(rng.integers(len(recent)))]
            visits.append((user, recent.get(user, 0)))
            recent[user] = visits[-1][1] + 1
            recent.move_to_end(user)
            if len(recent) > self.recent_users:
                recent.popitem(last=False)
        return visits


class Requests:
    """Histories and candidates cut out of one bank of random events, so that making them costs no time."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        self._items, self._tabs = rng.integers(1, NUM_ITEMS, _BANK), rng.integers(0, 3, _BANK)
        self._actions, self._times = rng.integers(0, 4, _BANK), np.sort(rng.integers(0, _NOW_MS // 2, _BANK))

    def request(self, load: Load, user: int, visit: int) -> tuple[History, Candidates]:
        length = load.history + visit * load.new_events
        first = user * 7919 % (_BANK - length)
        events = slice(first, first + length)
        history = History(
            items=self._items[events], times_ms=self._times[events], actions=self._actions[events],
            features={"event_tab": self._tabs[events]},
        )  # fmt: skip
        asked = slice(first // 2, first // 2 + load.candidates)
        candidates = Candidates(items=self._items[asked], now_ms=_NOW_MS, features={"event_tab": self._tabs[asked]})
        return history, candidates


def run_trial(engine: Engine, mode: Mode, load: Load, rate: float, *, tag: str = "") -> Trial:
    """One rate. Users of different tags are different users."""
    at_s = poisson_arrivals(rate, load.duration_s, load.seed)
    visits = load.visits(len(at_s))
    bank = Requests(load.seed)
    requests = [bank.request(load, *visit) for visit in visits]
    is_stray = np.random.default_rng(load.seed).random(len(at_s)) < mode.strays

    async def send(number: int) -> bool:
        user, (history, candidates) = f"{tag}.{visits[number][0]}", requests[number]
        try:
            if mode.sends_signals:
                engine.preinfer(user, history, candidates.now_ms, len(candidates), timeout_s=_TIMEOUT_S)
            await asyncio.sleep(load.signal_s)
            name = f"{user}.{number}" if is_stray[number] else user  # whoever comes by chance finds nothing of theirs
            work = engine.rank(name, history, candidates, timeout_s=_TIMEOUT_S)
            await asyncio.wrap_future(work.future)
        except RefusedError:
            return False
        return True

    trial = asyncio.run(run_open_loop(at_s, send, lead_s=load.signal_s))
    engine.wait_until_idle(_TIMEOUT_S)
    return trial
