"""Messages as lines of a log, for people or for programs, with the request that they are about.

Whatever a request holds stays out: of an exception that met one, the places are told and the values are not, since a
message such as that of KeyError repeats what was asked.
"""

import json
import logging
import time
import traceback
from collections.abc import Iterator
from typing import Any, Literal

from nestrec.base.config import config
from nestrec.base.errors import UserError
from nestrec.serving.safety.request_id import current_request_id

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


class TextLogLines(_LogLines):
    """For people."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        line = f"{moment},{int(record.msecs):03d} {record.levelname} {record.name}: {record.getMessage()}"
        fields = _fields(record, self.process)
        told = "".join(f" {name}={value}" for name, value in fields.items() if name != "exception")
        return "\n".join([line + told, *fields.get("exception", ())])


class JsonLogLines(_LogLines):
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
    return JsonLogLines(process) if cfg.format == "json" else TextLogLines(process)


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
