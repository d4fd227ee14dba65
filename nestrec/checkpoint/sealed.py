"""JSON that carries its own digest: a reader accepts exactly the bytes that were written."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def digest_of_plain(plain: Any) -> str:
    """SHA-256 over the canonical JSON."""
    return hashlib.sha256(_canonical(plain)).hexdigest()


def seal(plain: Mapping[str, Any]) -> bytes:
    """The content of a file."""
    return _canonical({**plain, "digest": digest_of_plain(plain)})


def unseal(content: bytes) -> dict[str, Any]:
    """The inverse of `seal`; `ValueError` for anything that it would not have written."""
    sealed = json.loads(content)
    if not isinstance(sealed, dict):
        raise ValueError("is no sealed JSON")
    plain = {key: value for key, value in sealed.items() if key != "digest"}
    if seal(plain) != content:
        raise ValueError("was changed: it does not match its own digest")
    return plain


def _canonical(plain: Any) -> bytes:
    return json.dumps(plain, sort_keys=True, indent=1).encode()
