"""Digests of keys, and how they are compared: in a time that tells nothing of what is right about a guess."""

import hashlib
import hmac
import secrets
from collections.abc import Sequence

_PREFIX = "nr_"
_RANDOM_BYTES = 32


def new_key() -> str:
    """256 random bits as text; the prefix lets scanners of code find one that was committed."""
    return _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def digest_of(key: bytes) -> bytes:
    """A fast hash will do: what it hides is random, so no list of likely keys can be tried."""
    return hashlib.sha256(key).digest()


def place_of(key: bytes, digests: Sequence[bytes]) -> int | None:
    """Which of the digests is the key's; all of them are compared whole, whichever it is."""
    own, found = digest_of(key), -1
    for place, digest in enumerate(digests):
        if hmac.compare_digest(own, digest):
            found = place
    return None if found < 0 else found
