"""A name for each request: the client's own where it gives a sound one, else a new one."""

import re
import secrets
from contextvars import ContextVar

HEADER = b"x-request-id"
_SOUND = re.compile(rb"[A-Za-z0-9._:+=-]{1,128}")
"""nothing that could end a line of a log or of a head, or be markup"""
current_request_id: ContextVar[str] = ContextVar("nestrec_request_id", default="")
"""of the request that this task serves"""


def request_id_of(given: bytes | None) -> str:
    """What is too long or holds other characters is not taken over, and not repeated either."""
    if given is not None and _SOUND.fullmatch(given):
        return given.decode("ascii")
    return secrets.token_hex(8)
