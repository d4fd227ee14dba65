"""Something slow that is asked for from outside: done one time after another, and the last request is never missed."""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

from nestrec.serving.background import BackgroundThread

Result = TypeVar("Result")


async def on_daemon_thread(act: Callable[[], Result]) -> Result:
    """Run `act` as `asyncio.to_thread` does, but on a thread that the end of the process does not wait for.

    Storage may never answer, and the executor's threads are joined when a loop is closed and when the process ends.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Result] = loop.create_future()

    def finish(settle: Callable[[], None]) -> None:
        def settle_if_wanted() -> None:
            if not ended.done():  # else the request was cancelled
                settle()

        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
            loop.call_soon_threadsafe(settle_if_wanted)

    def run() -> None:
        try:
            result = act()
        except BaseException as raised:
            error = raised
            finish(lambda: ended.set_exception(error))
        else:
            finish(lambda: ended.set_result(result))

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name="nestrec-slow", daemon=True).start()
    return await ended


class Serially:
    """A thread that acts when it is asked.

    Whoever asks while it acts gets one more turn after that one, however many ask: each turn sees the world as it is
    when the turn begins, so the last one sees what was there at the last request.
    """

    def __init__(self, name: str, act: Callable[[], None]):
        self._act = act
        self._condition = threading.Condition()
        self._is_closed = False
        self.num_asked = self.num_done = 0
        """requests, and those that have been seen to: equal where nothing is under way"""
        BackgroundThread(name, self._turn).start()

    def ask(self) -> None:
        with self._condition:
            self.num_asked += 1
            self._condition.notify_all()

    def close(self) -> None:
        """No further turn. One that is under way is left alone: the process is ending, and nothing waits for it."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def _turn(self) -> bool:
        with self._condition:
            self._condition.wait_for(lambda: self._is_closed or self.num_done < self.num_asked)
            if self._is_closed:
                return False
            asked = self.num_asked
        try:
            self._act()
        finally:
            self.num_done = asked
        return True
