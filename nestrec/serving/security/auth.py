"""API keys and roles (authentication and authorization), and files that are reloaded when they change.

Authorization: each route has an audience (anyone, clients, watchers, admins), and each role of a key includes some of
them.

Authentication: the server stores SHA-256 digests of the keys and compares them in constant time, so that response times
do not reveal how much of a guessed key is correct.

Files are polled by a thread rather than watched with inotify: secrets that Kubernetes mounts are replaced by changing a
symbolic link several folders up, which a watch on the file does not notice.

API keys are stored in a TOML file with names, roles, expiry times and rate limits. It is reloaded when it changes; if
it cannot be read any more, the known keys stay valid and the reason is logged. A file without keys is valid: every
request that needs a key is then rejected.

    [[key]]
    name = "shop"
    role = "public"
    sha256 = "..."
    expires_at = 2027-01-01T00:00:00Z
    requests_per_s = 200
"""

import datetime
import hashlib
import hmac
import logging
import re
import secrets
import stat
import threading
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from nestrec.base.clock import Clock, RealClock
from nestrec.base.config import config
from nestrec.base.config_values import from_plain
from nestrec.base.errors import UserError
from nestrec.base.files import write_atomic
from nestrec.serving.core.background_tasks import FAILURES, BackgroundThread, guarded

_PREFIX = "nr_"
_RANDOM_BYTES = 32


def generate_key() -> str:
    """Generate an API key of 256 random bits; its prefix lets secret scanners find keys that were committed to code."""
    return _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def digest_of(key: bytes) -> bytes:
    """Return the SHA-256 digest of a key. A fast hash is sufficient because keys are random, not passwords."""
    return hashlib.sha256(key).digest()


def find_key(key: bytes, digests: Sequence[bytes]) -> int | None:
    """Return the index of a key's digest, or None. Compares with all digests in constant time."""
    key_digest = digest_of(key)
    match = -1
    for index, digest in enumerate(digests):
        if hmac.compare_digest(key_digest, digest):
            match = index
    return None if match < 0 else match


_POLL_INTERVAL_S = 0.5
Mark = tuple[int, int, int]


class WatchedFiles:
    """Files that are read at construction and reloaded when they change; a failed reload is retried at each poll."""

    def __init__(self, name: str, paths: Sequence[Path], read: Callable[[], None], clock: Clock | None = None):
        """Read the files.

        Args:
            name: Name of the content, for the log and a metric.
            paths: Files to poll; a change of any of them reloads all.
            read: Reads the files and replaces the previous content, or raises an exception and keeps it. The exception
                of this first read propagates to the caller.
            clock: Clock for the age; None uses the real one.
        """
        self.name = name
        self._paths = list(paths)
        self._read = read
        self._clock = clock or RealClock()
        FAILURES.register(name)
        self._marks = self._marks_now()
        self._read()
        self._current_s = self._clock.now_s()

    @property
    def age_s(self) -> float:
        """Seconds since the last poll after which the content was up to date."""
        return self._clock.now_s() - self._current_s

    def reload_if_changed(self) -> bool:
        """Read the files again if they have changed and return whether they were read; log errors and never raise."""
        marks = self._marks_now()
        has_changed = marks != self._marks
        if has_changed:
            try:
                self._read()
            except Exception as error:
                FAILURES.add(self.name, error, "the content that was read before stays in use", about=tuple(marks))
                return False
        self._marks = marks
        self._current_s = self._clock.now_s()
        return has_changed

    def _marks_now(self) -> list[Mark | None]:
        return [_mark_of(path) for path in self._paths]


class Watcher:
    """Thread that polls files and reloads those that have changed, until it is closed."""

    def __init__(self, files: Sequence[WatchedFiles], every_s: float = _POLL_INTERVAL_S):
        self._files = list(files)
        self._every_s = every_s
        self._is_closed = threading.Event()
        if self._files:
            BackgroundThread("nestrec-files", self._poll).start()

    def close(self) -> None:
        self._is_closed.set()

    def _poll(self) -> bool:
        if self._is_closed.wait(self._every_s):
            return False
        for files in self._files:
            guarded(files.name, files.reload_if_changed)
        return True


def _mark_of(path: Path) -> Mark | None:
    """Return a value that changes if the file changes; None if the file does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


_LOG = logging.getLogger(__name__)
Role = Literal["public", "monitor", "admin"]
_MAX_KEYS = 256
"""Maximum number of keys in a file; every request is compared with all of them."""
_MIN_RATE = 1e-5
"""Smallest number of requests per second, about one per day; 1 / 1e-320 is infinite."""
_DIGEST_CHARACTERS = 64
_NAME = "must be 1 to 64 letters, digits, dots, dashes and underscores"


@config
class ApiKeyOptions:
    role: Role = "public"
    """Role of the key: public (inference endpoints), monitor (metrics and status), or admin (all endpoints)."""
    expires_at: str | None = None
    """Expiry time of the key in ISO 8601 with a time zone; none: the key never expires."""
    requests_per_s: float | None = None
    """Rate limit: sustained number of requests per second (token bucket); none: no limit."""
    burst: float | None = None
    """Capacity of the token bucket: number of requests that are allowed at once; none: those of one second."""


@config
class ApiKeyEntry(ApiKeyOptions):
    """Entry of a key in the file."""

    name: str
    """Name of the key, shown in logs and used for rate limits; not secret."""
    sha256: str
    """SHA-256 digest of the key in hexadecimal."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """API key that the server accepts."""

    name: str
    role: Role
    digest: bytes
    expires_s: float
    """Expiry time in Unix seconds; infinite if the key never expires."""
    requests_per_s: float
    """Rate limit in requests per second; infinite if there is none."""
    burst: float
    """Capacity of the token bucket in requests."""


class ApiKeyStore:
    """API keys of a file, reloaded when the file changes. Thread-safe: `find` can run during a reload."""

    def __init__(self, path: Path):
        self._path = path
        self.file = WatchedFiles("keys", [path], self._read)

    def find(self, presented: bytes) -> ApiKey | None:
        """Return the entry of a presented key, even if it has expired; None if the key is unknown."""
        keys, digests = self._known
        index = find_key(presented, digests)
        return None if index is None else keys[index]

    def reload_if_changed(self) -> bool:
        """Reload the file if it has changed and return whether it was reloaded; if that fails, the known keys stay."""
        return self.file.reload_if_changed()

    def _read(self) -> None:
        self._known = _index_by_digest(read_keys(self._path))
        count = len(self._known[0])
        if count:
            _LOG.info("loaded %d API keys", count)
        else:
            _LOG.warning("%s contains no API keys: every request that needs one is rejected", self._path)


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Read and validate the keys of a file; raise `UserError` if it is not readable, world-writable or invalid."""
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        remedy = "create it with: nestrec create-key NAME --file FILE"
        raise UserError(
            f"cannot be read: {error}", option="security.api_keys", value=str(path), remedy=remedy
        ) from error
    if stat.S_IMODE(mode) & stat.S_IWOTH:
        remedy = f"run chmod o-w {path}"
        raise UserError("the file is writable by all users", option="security.api_keys", value=str(path), remedy=remedy)
    return parse_keys(_parse_toml(text, path), str(path))


def _parse_toml(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: tables that are nested too deeply
        remedy = "fix the file, or create a new one with: nestrec create-key NAME --file FILE"
        raise UserError(
            f"the key file is not TOML: {error}", option="security.api_keys", value=str(path), remedy=remedy
        ) from error


def parse_keys(plain: dict[str, Any], where: str) -> tuple[ApiKey, ...]:
    """Validate the keys of a parsed file.

    Args:
        plain: Parsed TOML.
        where: Name of the file, for errors.

    Raises:
        UserError: An entry is invalid, there are too many keys, or a name or digest occurs twice.
    """
    entries = plain.get("key", [])
    if set(plain) - {"key"} or not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise UserError(
            "must contain only [[key]] tables",
            option="security.api_keys",
            value=where,
            remedy="write them with nestrec create-key",
        )
    if len(entries) > _MAX_KEYS:
        remedy = f"remove keys: every request is compared with each of them, so at most {_MAX_KEYS} are allowed"
        raise UserError(f"contains {len(entries)} keys", option="security.api_keys", value=where, remedy=remedy)
    keys = tuple(_key(from_plain(ApiKeyEntry, _plain_dates(entry), f"key[{i}]")) for i, entry in enumerate(entries))
    for field, values in (("name", [key.name for key in keys]), ("sha256", [key.digest for key in keys])):
        if len(set(values)) < len(values):
            raise UserError(
                f"two keys have the same {field}",
                option="security.api_keys",
                value=where,
                remedy="make names and digests unique",
            )
    return keys


def _key(entry: ApiKeyEntry) -> ApiKey:
    field = f"key {entry.name[:64]!r}"
    if not 1 <= len(entry.name) <= 64 or not all(c.isascii() and (c.isalnum() or c in "._-") for c in entry.name):
        raise UserError(_NAME, option="key.name", value=entry.name[:80], remedy="choose another name")
    digest = entry.sha256.lower()
    if len(digest) != _DIGEST_CHARACTERS or not all(c in "0123456789abcdef" for c in digest):
        remedy = "write the SHA-256 digest of the key in hexadecimal, not the key itself"
        raise UserError(
            "must have 64 hexadecimal digits", option=f"{field}: sha256", value="(not shown)", remedy=remedy
        )
    rate = float("inf") if entry.requests_per_s is None else entry.requests_per_s
    burst = max(1.0, rate) if entry.burst is None else entry.burst
    if not rate >= _MIN_RATE or not burst >= 1.0:
        remedy = f"set requests_per_s to at least {_MIN_RATE} and burst to at least 1, or remove them"
        raise UserError(
            "the rate limit rejects all requests",
            option=field,
            value=(entry.requests_per_s, entry.burst),
            remedy=remedy,
        )
    return ApiKey(entry.name, entry.role, bytes.fromhex(digest), expiry_s(entry.expires_at, field), rate, burst)


def expiry_s(text: str | None, field: str) -> float:
    """Convert an expiry time in ISO 8601 to Unix seconds; None becomes infinity."""
    if text is None:
        return float("inf")
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        remedy = "write it as 2027-01-01T00:00:00Z, for example"
        raise UserError(
            "must be a time in ISO 8601 with a time zone", option=f"{field}: expires_at", value=text[:80], remedy=remedy
        )
    return moment.timestamp()


def format_entry(entry: ApiKeyEntry) -> str:
    """Validate an entry and return it as TOML, ready to be appended to the file."""
    _key(entry)
    lines = ["[[key]]", f'name = "{entry.name}"', f'role = "{entry.role}"', f'sha256 = "{entry.sha256}"']
    lines += [f'expires_at = "{entry.expires_at}"'] if entry.expires_at is not None else []
    lines += [f"requests_per_s = {entry.requests_per_s}"] if entry.requests_per_s is not None else []
    lines += [f"burst = {entry.burst}"] if entry.burst is not None else []
    return "\n".join(lines) + "\n"


def add_entry(path: Path, entry: ApiKeyEntry) -> None:
    """Add a key to a file that only its owner can read. The file is replaced atomically."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    text = (before.rstrip() + "\n\n" if before.strip() else "") + format_entry(entry)
    parse_keys(_parse_toml(text, path), str(path))
    write_atomic(path, text, mode=0o600)


def _plain_dates(entry: dict[str, Any]) -> dict[str, Any]:
    """Convert the dates and times that TOML parses to ISO 8601 text, which the entries contain."""
    return {name: v.isoformat() if isinstance(v, datetime.date) else v for name, v in entry.items()}


def _index_by_digest(keys: tuple[ApiKey, ...]) -> tuple[tuple[ApiKey, ...], tuple[bytes, ...]]:
    return keys, tuple(key.digest for key in keys)


Audience = Literal["anyone", "clients", "watchers", "admins"]
_ADMIN = "/v1/admin/"
"""Path prefix of admin routes, including those of plugins."""
_MAY: dict[Role, frozenset[Audience]] = {
    "public": frozenset({"anyone", "clients"}),
    "monitor": frozenset({"anyone", "watchers"}),
    "admin": frozenset({"anyone", "clients", "watchers", "admins"}),
}


class ProtectedRoute(Protocol):
    """Properties of an endpoint that determine its audience (see `EndpointSpec`)."""

    @property
    def path(self) -> str: ...
    @property
    def audience(self) -> Audience: ...
    @property
    def admin(self) -> bool: ...


class AccessRules:
    """Audience of each path. Unknown paths have the audience `clients`, so only authorized callers get a 404."""

    def __init__(self, endpoints: Iterable[ProtectedRoute], other_paths: Mapping[str, Audience] | None = None):
        """Collect the audiences of the routes.

        Args:
            endpoints: Endpoints of the server.
            other_paths: Audiences of additional paths.
        """
        self._exact: dict[str, Audience] = dict(other_paths or {})
        self._patterns: list[tuple[re.Pattern[str], str, Audience]] = []
        for endpoint in endpoints:
            audience: Audience = "admins" if endpoint.admin else endpoint.audience
            if "{" in endpoint.path:
                pattern = re.compile(re.sub(r"\\{\w+\\}", "([^/]*)", re.escape(endpoint.path)))
                self._patterns.append((pattern, endpoint.path, audience))
            else:
                self._exact[endpoint.path] = audience

    def audience_of(self, path: str, raw_path: str) -> Audience:
        """Return the audience of a path.

        Args:
            path: Decoded path.
            raw_path: Percent-encoded path, in which an id can contain any character.
        """
        if path.startswith(_ADMIN):
            return "admins"
        if (audience := self._exact.get(path)) is not None:
            return audience
        return next((audience for pattern, _, audience in self._patterns if pattern.fullmatch(raw_path)), "clients")

    def route_of(self, path: str, raw_path: str) -> str:
        """Return the declared route of a path, which contains no ids; `other` for unknown paths."""
        if path in self._exact:
            return path
        return next((route for pattern, route, _ in self._patterns if pattern.fullmatch(raw_path)), "other")


def is_allowed(role: Role, audience: Audience) -> bool:
    return audience in _MAY[role]
