"""What an instance knows its front by: a secret of the start, which no other process of the machine has."""

import functools
import hmac
import os
import secrets
import threading

HEADER = b"x-nestrec-front"
VARIABLE = "NESTREC_FRONT_SECRET"


_LOCK = threading.Lock()
"""instances are started by a thread each: a cache alone lets all of them make one, and the front keeps only the last"""


def front_secret() -> str:
    """Of this process: its front's, which is taken out of the environment, or a new one where it is the front."""
    with _LOCK:
        return _made_once()


@functools.cache
def _made_once() -> str:
    return os.environ.pop(VARIABLE, None) or secrets.token_hex(32)


def is_front(given: bytes) -> bool:
    return hmac.compare_digest(given, front_secret().encode())
