"""A log that never makes a server wait for whoever reads it.

Where standard error is a pipe that nobody reads, a write waits without end, and with it the thread that logs: the one
of the engine, or the one that answers. So a thread of its own writes, and what it cannot keep up with is dropped and
counted.
"""

import logging
import os
import queue
import time

from nestrec.serving.api.process.log_lines import LogConfig, formatter_of
from nestrec.serving.background import BackgroundThread

_MOST_WAITING = 1000
"""messages"""
_MOST_CHARACTERS = 20_000
"""of one message"""


class PatientHandler(logging.Handler):
    """Hands messages to a thread that writes them to a file descriptor, without a lock that the end of the process
    could wait for."""

    def __init__(self, descriptor: int = 2, cfg: LogConfig | None = None, process: str = ""):
        super().__init__()
        self._descriptor = descriptor
        self._waiting: queue.Queue[str] = queue.Queue(_MOST_WAITING)
        self._num_dropped = 0
        self.setFormatter(formatter_of(cfg or LogConfig(), process))
        BackgroundThread("nestrec-log", self._turn).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)[:_MOST_CHARACTERS]
        except Exception as error:  # a message that cannot be written must not end what it tells of
            text = f"{record.name}: a message could not be formatted: {type(error).__name__}"
        try:
            self._waiting.put_nowait(text)
        except queue.Full:
            self._num_dropped += 1

    def _turn(self) -> bool:
        text = self._waiting.get()
        try:
            self._write(text)
        finally:
            self._waiting.task_done()
        return True

    def _write(self, text: str) -> None:
        data = f"{text}\n"
        num_dropped, self._num_dropped = self._num_dropped, 0
        if num_dropped:
            data += f"{self._told_dropped(num_dropped)}\n"
        try:
            _write_all(self._descriptor, data.encode("utf-8", "replace"))
        except OSError:  # the reader is gone, or a disk is full, which may have room for a later message
            self._num_dropped += num_dropped + 1

    def _told_dropped(self, count: int) -> str:
        told = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
        return self.format(logging.makeLogRecord({**told, "msg": f"{count} messages were dropped: nobody took them"}))

    def wait(self, timeout_s: float) -> None:
        """Until all is written, or not: nobody may read it."""
        end_s = time.monotonic() + timeout_s
        while self._waiting.unfinished_tasks and time.monotonic() < end_s:
            time.sleep(0.005)


def log_without_waiting(cfg: LogConfig, process: str = "") -> None:
    """Everything that is logged from now on goes to standard error through one handler, with what this package tells
    its operator: what took over, what was lost, that it ended. process: names this process in each line."""
    root = logging.getLogger()
    if not any(isinstance(handler, PatientHandler) for handler in root.handlers):
        root.addHandler(PatientHandler(cfg=cfg, process=process))
    logging.getLogger("nestrec").setLevel(logging.INFO)
    if cfg.format == "json":  # a warning as plain text would break whatever parses the lines
        logging.captureWarnings(True)


def wait_for_log(timeout_s: float = 1.0) -> None:
    """Give the last messages their time before the process ends."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, PatientHandler):
            handler.wait(timeout_s)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
