"""API keys in a file: names, roles, ends and rates, with a digest in place of each key.

The file is TOML. It is read again when it changes; where it cannot be read any more the keys that were known stay, and
the log contains the reason. A file without keys is valid: every request that needs a key is rejected.

    [[key]]
    name = "shop"
    role = "public"
    sha256 = "..."
    expires = 2027-01-01T00:00:00Z
    requests_per_s = 200
"""

import datetime
import logging
import os
import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nestrec.base.config import config, from_plain
from nestrec.base.errors import UserError
from nestrec.serving.safety.digests import place_of
from nestrec.serving.safety.watched_files import WatchedFiles

_LOG = logging.getLogger(__name__)
Role = Literal["public", "monitor", "admin"]
_MOST_KEYS = 256
"""each is compared for each request"""
_LEAST_RATE = 1e-5
"""Smallest number of requests per second, about one per day; 1 / 1e-320 is infinite."""
_DIGEST_CHARACTERS = 64
_NAME = "must be 1 to 64 letters, digits, dots, dashes and underscores"


@config
class KeyOptions:
    role: Role = "public"
    """public: what clients ask; monitor: what operators look at; admin: everything"""
    expires: str | None = None
    """from this moment (ISO 8601, with its zone) it is not taken any more"""
    requests_per_s: float | None = None
    """most requests a second in the long run; none: no limit"""
    burst: float | None = None
    """requests that may come at once; none: those of a second"""


@config
class KeyEntry(KeyOptions):
    """A key as the file has it."""

    name: str
    """for logs and limits; never secret"""
    sha256: str
    """digest of the key, in hexadecimal"""


@dataclass(frozen=True, slots=True)
class Key:
    """A key that the server knows."""

    name: str
    role: Role
    digest: bytes
    expires_s: float
    """Unix seconds"""
    requests_per_s: float
    """infinite where there is no limit"""
    burst: float


class KeyRing:
    """The keys of a file, as it is now. `find` may be called from any thread while another one reads the file again."""

    def __init__(self, path: Path):
        self._path = path
        self.file = WatchedFiles("keys", [path], self._read)

    def find(self, presented: bytes) -> Key | None:
        """The key that was presented, whether it has ended or not."""
        keys, digests = self._known
        place = place_of(presented, digests)
        return None if place is None else keys[place]

    def reload_if_changed(self) -> bool:
        """Whether the file was read again; where that is not possible, the keys that are known stay."""
        return self.file.look()

    def _read(self) -> None:
        self._known = _indexed(read_keys(self._path))
        count = len(self._known[0])
        if count:
            _LOG.info("%d keys are known from now on", count)
        else:
            _LOG.warning("%s contains no key: every request that needs one is rejected", self._path)


def read_keys(path: Path) -> tuple[Key, ...]:
    """All keys of a file; `UserError` names what is wrong with it."""
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        remedy = "make one with: nestrec key NAME --file FILE"
        raise UserError(f"cannot be read: {error}", field="safety.keys", value=str(path), remedy=remedy) from error
    if stat.S_IMODE(mode) & stat.S_IWOTH:
        remedy = f"chmod o-w {path}"
        raise UserError("may be written by anybody", field="safety.keys", value=str(path), remedy=remedy)
    try:
        plain = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also of numbers that are too long, and of tables nested too deeply
        remedy = "fix it, or write a new one with: nestrec key NAME --file FILE"
        raise UserError(f"is not TOML: {error}", field="safety.keys", value=str(path), remedy=remedy) from error
    return keys_from(plain, str(path))


def keys_from(plain: dict[str, Any], where: str) -> tuple[Key, ...]:
    """Keys of what a file holds. where: its name, for errors."""
    entries = plain.get("key", [])
    if set(plain) - {"key"} or not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise UserError("must hold [[key]] tables alone", field="safety.keys", value=where, remedy="see `nestrec key`")
    if len(entries) > _MOST_KEYS:
        remedy = f"keep at most {_MOST_KEYS} of them: each is compared for each request"
        raise UserError(f"holds {len(entries)} keys", field="safety.keys", value=where, remedy=remedy)
    keys = tuple(_key(from_plain(KeyEntry, _plain_dates(entry), f"key[{i}]")) for i, entry in enumerate(entries))
    for what, values in (("name", [key.name for key in keys]), ("sha256", [key.digest for key in keys])):
        if len(set(values)) < len(values):
            raise UserError(f"has a {what} twice", field="safety.keys", value=where, remedy="give each key its own")
    return keys


def _key(entry: KeyEntry) -> Key:
    field = f"key {entry.name[:64]!r}"
    if not 1 <= len(entry.name) <= 64 or not all(c.isascii() and (c.isalnum() or c in "._-") for c in entry.name):
        raise UserError(_NAME, field="key.name", value=entry.name[:80], remedy="give it such a name")
    digest = entry.sha256.lower()
    if len(digest) != _DIGEST_CHARACTERS or not all(c in "0123456789abcdef" for c in digest):
        remedy = "give the SHA-256 of the key in hexadecimal; the key itself does not belong into the file"
        raise UserError("is no digest", field=f"{field}: sha256", value="(not shown)", remedy=remedy)
    rate = float("inf") if entry.requests_per_s is None else entry.requests_per_s
    burst = max(1.0, rate) if entry.burst is None else entry.burst
    if not rate >= _LEAST_RATE or not burst >= 1.0:
        remedy = f"give a rate of {_LEAST_RATE} or more and a burst of 1 or more, or leave them out"
        raise UserError("lets nothing through", field=field, value=(entry.requests_per_s, entry.burst), remedy=remedy)
    return Key(entry.name, entry.role, bytes.fromhex(digest), expiry_s(entry.expires, field), rate, burst)


def expiry_s(text: str | None, field: str) -> float:
    """Unix seconds of a moment in ISO 8601; infinite where there is none."""
    if text is None:
        return float("inf")
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        remedy = "write it with its zone, such as 2027-01-01T00:00:00Z"
        raise UserError("is no moment", field=f"{field}: expires", value=text[:80], remedy=remedy)
    return moment.timestamp()


def new_entry(entry: KeyEntry) -> str:
    """An entry as text that can be added to a file."""
    _key(entry)
    lines = ["[[key]]", f'name = "{entry.name}"', f'role = "{entry.role}"', f'sha256 = "{entry.sha256}"']
    lines += [f'expires = "{entry.expires}"'] if entry.expires is not None else []
    lines += [f"requests_per_s = {entry.requests_per_s}"] if entry.requests_per_s is not None else []
    lines += [f"burst = {entry.burst}"] if entry.burst is not None else []
    return "\n".join(lines) + "\n"


def add_entry(path: Path, entry: KeyEntry) -> None:
    """Add a key to a file, which nobody but its owner may read; whoever reads it sees the old one or the new one."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    text = (before.rstrip() + "\n\n" if before.strip() else "") + new_entry(entry)
    keys_from(tomllib.loads(text), str(path))
    partial = path.with_name(path.name + ".partial")
    partial.touch(mode=0o600)
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _plain_dates(entry: dict[str, Any]) -> dict[str, Any]:
    """TOML has moments of its own."""
    return {name: v.isoformat() if isinstance(v, datetime.date) else v for name, v in entry.items()}


def _indexed(keys: tuple[Key, ...]) -> tuple[tuple[Key, ...], tuple[bytes, ...]]:
    return keys, tuple(key.digest for key in keys)
