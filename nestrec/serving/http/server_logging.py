"""Logging of the server: formats, access log, and a handler that never blocks.

A log that never makes a server wait for whoever reads it.

Where standard error is a pipe that nobody reads, a write waits without end, and with it the thread that logs: the one
of the engine, or the one that answers. So a thread of its own writes, and what it cannot keep up with is dropped and
counted.

Messages as lines of a log, for people or for programs, with the request that they are about.

Whatever a request holds stays out: of an exception that met one, the places are told and the values are not, since a
message such as that of KeyError repeats what was asked.

A line for each answer, where they are asked for.
"""

import json
import logging
import os
import queue
import time
import traceback
from collections.abc import Iterator
from typing import Any, Literal

from nestrec.base.config import config
from nestrec.base.errors import UserError
from nestrec.serving.core.background_tasks import BackgroundThread
from nestrec.serving.core.request_limits import current_request_id
from nestrec.serving.http.fast_request import RequestHead

_TELLING = (UserError, OSError, MemoryError, RuntimeError)
"""kinds of exceptions whose messages speak of the machine, where no request is being served"""


@config
class LogConfig:
    format: Literal["text", "json"] = "text"
    """json: an object a line, with time, level, logger, message and what else is known (process, request_id,
    exception)"""
    requests: bool = False
    """a line for each answer: its request's id, route, status, milliseconds and key; never who or what it is about"""


class _LogLines(logging.Formatter):
    """Knows which process writes the lines."""

    def __init__(self, process: str = ""):
        """process: "gateway" or "instance-N" of a fleet; empty for a server that is alone."""
        super().__init__()
        self.process = process


class TextLogFormatter(_LogLines):
    """For people."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        line = f"{moment},{int(record.msecs):03d} {record.levelname} {record.name}: {record.getMessage()}"
        fields = _fields(record, self.process)
        told = "".join(f" {name}={value}" for name, value in fields.items() if name != "exception")
        return "\n".join([line + told, *fields.get("exception", ())])


class JsonLogFormatter(_LogLines):
    """For programs: one object a line."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record, self.process),
        }
        return json.dumps(line, default=str)


def formatter_of(cfg: LogConfig, process: str = "") -> logging.Formatter:
    return JsonLogFormatter(process) if cfg.format == "json" else TextLogFormatter(process)


def _fields(record: logging.LogRecord, process: str) -> dict[str, Any]:
    """What is known beside the message. A caller gives fields of its own by extra={"fields": {...}}."""
    request_id = current_request_id.get()
    found: dict[str, Any] = {"process": process} if process else {}
    found |= {"request_id": request_id} if request_id else {}
    found |= getattr(record, "fields", {})
    if record.exc_info and record.exc_info[1] is not None:
        found["exception"] = list(_told(record.exc_info[1], in_request=bool(request_id)))
    return found


def _told(error: BaseException, *, in_request: bool) -> Iterator[str]:
    """Kind and places of an exception and of those before it, last one first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        is_told = isinstance(current, _TELLING) and not in_request
        yield type(current).__name__ + (f": {current}" if is_told else "")
        for frame in traceback.extract_tb(current.__traceback__):
            yield f"  {frame.filename}:{frame.lineno} in {frame.name}"
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


_MOST_WAITING = 1000
"""messages"""
_MOST_CHARACTERS = 20_000
"""of one message"""


class NonBlockingLogHandler(logging.Handler):
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
    if not any(isinstance(handler, NonBlockingLogHandler) for handler in root.handlers):
        root.addHandler(NonBlockingLogHandler(cfg=cfg, process=process))
    logging.getLogger("nestrec").setLevel(logging.INFO)
    if cfg.format == "json":  # a warning as plain text would break whatever parses the lines
        logging.captureWarnings(True)


def wait_for_log(timeout_s: float = 1.0) -> None:
    """Give the last messages their time before the process ends."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, NonBlockingLogHandler):
            handler.wait(timeout_s)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


_LOG = logging.getLogger("nestrec.requests")


def log_answer(incoming: RequestHead, status: int) -> None:
    """route: as it is declared, so without the id of a user in it."""
    fields = {
        "request_id": incoming.id,
        "route": incoming.route,
        "status": status,
        "milliseconds": round((time.perf_counter() - incoming.came_s) * 1e3, 2),
    }
    _LOG.info("answered", extra={"fields": fields | ({"key": incoming.key} if incoming.key else {})})


def log_answer_to_front(incoming: RequestHead, status: int) -> None:
    """Log an answer of an instance, unless its front has checked its health, which it does several times per second."""
    if not incoming.route.startswith("/health/"):
        log_answer(incoming, status)
