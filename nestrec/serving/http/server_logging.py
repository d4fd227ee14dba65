"""Logging of the server: text and JSON formats, access log, and a handler that never blocks.

If standard error is a pipe that is not read, a write blocks forever, and with it the thread that logs: the event loop
or the engine. Therefore a separate thread writes the log; messages that it cannot write in time are dropped and
counted.

Log lines contain the id of the request, but no content of requests, which is personal data. Of an exception during a
request, the log has the type and the stack trace, but not the message, because a message such as that of KeyError can
repeat a value of the request.
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

_LOGGED_MESSAGES = (UserError, OSError, MemoryError, RuntimeError)
"""Exception types whose messages are logged outside of requests, because they describe the machine."""


@config
class LogConfig:
    """Options of the log."""

    format: Literal["text", "json"] = "text"
    """Format of the log: text, or json with one object per line (time, level, logger, message, and if known process,
    request_id and exception)."""
    access_log: bool = False
    """Log one line per response with the request id, route, status, duration in milliseconds and name of the API key,
    but without user ids or content."""


class _ProcessFormatter(logging.Formatter):
    """Base class of formatters that add the name of the process.

    Args:
        process: Name of the process: "gateway" or "instance-N" of a fleet; empty for a single server.
    """

    def __init__(self, process: str = ""):
        super().__init__()
        self.process = process


class TextLogFormatter(_ProcessFormatter):
    """Formatter of text lines."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        line = f"{moment},{int(record.msecs):03d} {record.levelname} {record.name}: {record.getMessage()}"
        fields = _fields(record, self.process)
        pairs = "".join(f" {name}={value}" for name, value in fields.items() if name != "exception")
        return "\n".join([line + pairs, *fields.get("exception", ())])


class JsonLogFormatter(_ProcessFormatter):
    """Formatter of JSON lines, one object per message."""

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
    """Return the fields of a log line in addition to its message; callers add some with extra={"fields": {...}}."""
    request_id = current_request_id.get()
    fields: dict[str, Any] = {"process": process} if process else {}
    fields |= {"request_id": request_id} if request_id else {}
    fields |= getattr(record, "fields", {})
    if record.exc_info and record.exc_info[1] is not None:
        fields["exception"] = list(_exception_lines(record.exc_info[1], in_request=bool(request_id)))
    return fields


def _exception_lines(error: BaseException, *, in_request: bool) -> Iterator[str]:
    """Yield the type and the stack trace of an exception and of its causes, the last exception first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        has_message = isinstance(current, _LOGGED_MESSAGES) and not in_request
        yield type(current).__name__ + (f": {current}" if has_message else "")
        for frame in traceback.extract_tb(current.__traceback__):
            yield f"  {frame.filename}:{frame.lineno} in {frame.name}"
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


_MAX_QUEUED = 1000
"""Maximum number of messages that wait to be written."""
_MAX_CHARACTERS = 20_000
"""Maximum length of a message in characters; longer ones are truncated."""


class NonBlockingLogHandler(logging.Handler):
    """Logging handler that never blocks: a thread writes the messages to a file descriptor.

    It holds no lock while it writes, so the process can exit during a blocked write.

    Args:
        descriptor: File descriptor; standard error by default.
        cfg: Format of the messages.
        process: Name of the process in each line.
    """

    def __init__(self, descriptor: int = 2, cfg: LogConfig | None = None, process: str = ""):
        super().__init__()
        self._descriptor = descriptor
        self._queue: queue.Queue[str] = queue.Queue(_MAX_QUEUED)
        self._num_dropped = 0
        self.setFormatter(formatter_of(cfg or LogConfig(), process))
        BackgroundThread("nestrec-log", self._turn).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)[:_MAX_CHARACTERS]
        except Exception as error:  # a log message must not fail the operation that logs it
            text = f"{record.name}: a message could not be formatted: {type(error).__name__}"
        try:
            self._queue.put_nowait(text)
        except queue.Full:
            self._num_dropped += 1

    def _turn(self) -> bool:
        text = self._queue.get()
        try:
            self._write(text)
        finally:
            self._queue.task_done()
        return True

    def _write(self, text: str) -> None:
        data = f"{text}\n"
        num_dropped, self._num_dropped = self._num_dropped, 0
        if num_dropped:
            data += f"{self._format_dropped(num_dropped)}\n"
        try:
            _write_all(self._descriptor, data.encode("utf-8", "replace"))
        except OSError:  # the reader exited, or the disk is full, which may be temporary
            self._num_dropped += num_dropped + 1

    def _format_dropped(self, count: int) -> str:
        attributes = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
        return self.format(
            logging.makeLogRecord(
                {**attributes, "msg": f"{count} messages were dropped: the log is not read fast enough"}
            )
        )

    def wait(self, timeout_s: float) -> None:
        """Wait until all messages are written, or until the timeout, because the log may not be read."""
        end_s = time.monotonic() + timeout_s
        while self._queue.unfinished_tasks and time.monotonic() < end_s:
            time.sleep(0.005)


def install_nonblocking_log(cfg: LogConfig, process: str = "") -> None:
    """Send all log messages of this process to standard error through a `NonBlockingLogHandler`.

    Args:
        cfg: Format of the log.
        process: Name of this process in each line.
    """
    root = logging.getLogger()
    if not any(isinstance(handler, NonBlockingLogHandler) for handler in root.handlers):
        root.addHandler(NonBlockingLogHandler(cfg=cfg, process=process))
    logging.getLogger("nestrec").setLevel(logging.INFO)
    if cfg.format == "json":  # a plain-text warning would break programs that parse the lines
        logging.captureWarnings(True)


def wait_for_log(timeout_s: float = 1.0) -> None:
    """Wait until the last messages are written, for use before the process exits."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, NonBlockingLogHandler):
            handler.wait(timeout_s)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


_LOG = logging.getLogger("nestrec.access")


def log_response(head: RequestHead, status: int) -> None:
    """Write a line of the access log; the route has no parameter values, so the line contains no user id."""
    fields = {
        "request_id": head.id,
        "route": head.route,
        "status": status,
        "milliseconds": round((time.perf_counter() - head.arrived_s) * 1e3, 2),
    }
    _LOG.info("response sent", extra={"fields": fields | ({"key": head.key} if head.key else {})})


def log_instance_response(head: RequestHead, status: int) -> None:
    """Write a line of the access log of an instance, except for health checks, which the gateway sends frequently."""
    if not head.route.startswith("/health/"):
        log_response(head, status)
