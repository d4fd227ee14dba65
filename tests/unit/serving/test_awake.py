"""A front's event loop does not sleep while requests come."""

import asyncio
import selectors

from nestrec.serving.frontend import frontend_app as module
from nestrec.serving.frontend.frontend_app import KeepAwake


class Waits(selectors.SelectSelector):
    """How long the loop was ready to wait, each time."""

    def __init__(self):
        super().__init__()
        self.timeouts = []

    def select(self, timeout=None):
        self.timeouts.append(timeout)
        return super().select(0)


def test_a_loop_stays_awake_until_a_while_after_the_last_request(monkeypatch):
    now_s = [0.0]
    waits = Waits()
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s[0])
    loop = asyncio.SelectorEventLoop(waits)

    def asked_to_wait(turns=5):
        """Whether any of the next turns of the loop, which has nothing else to do, would have slept."""
        waits.timeouts.clear()
        for _ in range(turns):
            loop._run_once()
        return any(timeout is None or timeout > 0 for timeout in waits.timeouts)

    try:
        asyncio._set_running_loop(loop)
        awake = KeepAwake(0.02)
        assert asked_to_wait()
        awake.called()
        awake.called()
        assert not asked_to_wait()
        assert len(loop._ready) == 1, "one turn after the other, however many requests come"
        now_s[0] = 0.015
        awake.called()
        now_s[0] = 0.03
        assert not asked_to_wait(), "the last one counts"
        now_s[0] = 0.04
        assert asked_to_wait()
        KeepAwake(0.0).called()
        assert asked_to_wait(1), "without a time it changes nothing"
    finally:
        asyncio._set_running_loop(None)
        loop.close()
