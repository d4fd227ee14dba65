"""The event loop of a frontend worker does not sleep while requests arrive."""

import asyncio
import selectors

from nestrec.serving.frontend import frontend_app as module
from nestrec.serving.frontend.frontend_app import KeepAwake


class RecordingSelector(selectors.SelectSelector):
    """Selector that records the timeouts of the event loop and does not wait."""

    def __init__(self):
        super().__init__()
        self.timeouts = []

    def select(self, timeout=None):
        self.timeouts.append(timeout)
        return super().select(0)


def test_keep_awake_ends_after_last_request(monkeypatch):
    now_s = [0.0]
    selector = RecordingSelector()
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s[0])
    loop = asyncio.SelectorEventLoop(selector)

    def would_sleep(turns=5):
        """Return whether one of the next turns of the idle loop would have slept."""
        selector.timeouts.clear()
        for _ in range(turns):
            loop._run_once()
        return any(timeout is None or timeout > 0 for timeout in selector.timeouts)

    try:
        asyncio._set_running_loop(loop)
        awake = KeepAwake(0.02)
        assert would_sleep()
        awake.on_request()
        awake.on_request()
        assert not would_sleep()
        assert len(loop._ready) == 1, "any number of requests schedules one turn at a time"
        now_s[0] = 0.015
        awake.on_request()
        now_s[0] = 0.03
        assert not would_sleep(), "the time starts at the last request"
        now_s[0] = 0.04
        assert would_sleep()
        KeepAwake(0.0).on_request()
        assert would_sleep(1), "a time of zero must have no effect"
    finally:
        asyncio._set_running_loop(None)
        loop.close()
