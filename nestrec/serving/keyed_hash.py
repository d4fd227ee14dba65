"""Keyed hashes over tagged fields: nobody outside can aim at a slot, and no two lists of fields read the same."""

import secrets
from hashlib import blake2b

Field = str | bytes | int


class KeyedHash:
    """BLAKE2b under a secret; a new secret for each process unless one is given."""

    def __init__(self, secret: bytes | None = None):
        self._secret = secret or secrets.token_bytes(32)

    def digest(self, purpose: str, *fields: Field) -> bytes:
        """16 bytes of (purpose, fields); type and length of each field take part."""
        state = blake2b(digest_size=16, key=self._secret, person=purpose.encode()[:16])
        for field in fields:
            tag, content = _encoded(field)
            state.update(tag + len(content).to_bytes(8, "little"))
            state.update(content)
        return state.digest()

    def number(self, purpose: str, *fields: Field) -> int:
        """64 bits of the digest."""
        return int.from_bytes(self.digest(purpose, *fields)[:8], "little")


def _encoded(field: Field) -> tuple[bytes, bytes]:
    if isinstance(field, str):
        return b"s", field.encode("utf-8", "surrogatepass")
    if isinstance(field, int):
        return b"i", str(field).encode()
    return b"b", field
