"""What an instance knows its front by: a secret of the start, which no other process of the machine has."""

import functools
import hmac
import os
import secrets

HEADER = b"x-nestrec-front"
VARIABLE = "NESTREC_FRONT_SECRET"


@functools.cache
def front_secret() -> str:
    """Of this process: its front's, which is taken out of the environment, or a new one where it is the front."""
    return os.environ.pop(VARIABLE, None) or secrets.token_hex(32)


def is_front(given: bytes) -> bool:
    return hmac.compare_digest(given, front_secret().encode())
