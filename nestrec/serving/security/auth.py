"""API keys and roles: authentication, authorization, and files that are watched.

Whom each route is for: anyone, clients, those who watch a server, or those who change it.

Digests of keys, and how they are compared: in a time that tells nothing of what is right about a guess.

Files that are read again when they change, by a thread that looks once in a while.

Not by a notification of the system: secrets that an orchestrator mounts are replaced by a symbolic link several folders
up, which a watch on the file does not see.

API keys in a file: names, roles, ends and rates, with a digest in place of each key.

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
import hashlib
import hmac
import logging
import re
import secrets
import stat
import threading
import tomllib
from collections.abc import Callable, Iterable, Sequence
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


def new_key() -> str:
    """256 random bits as text; the prefix lets scanners of code find one that was committed."""
    return _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def digest_of(key: bytes) -> bytes:
    """A fast hash will do: what it hides is random, so no list of likely keys can be tried."""
    return hashlib.sha256(key).digest()


def place_of(key: bytes, digests: Sequence[bytes]) -> int | None:
    """Which of the digests is the key's; all of them are compared whole, whichever it is."""
    own = digest_of(key)
    found = -1
    for place, digest in enumerate(digests):
        if hmac.compare_digest(own, digest):
            found = place
    return None if found < 0 else found


_EVERY_S = 0.5
Mark = tuple[int, int, int]


class WatchedFiles:
    """Files that are read now, and again whenever they are different. If that fails, it is tried at each look."""

    def __init__(self, name: str, paths: Sequence[Path], read: Callable[[], None], clock: Clock | None = None):
        """name: of their content, for the log and a metric. read: takes the files over, or raises an exception and
        keeps what was read before; what it raises here is for the caller."""
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
        """Seconds since the last look that found the files as they were last read, or read them again."""
        return self._clock.now_s() - self._current_s

    def look(self) -> bool:
        """Read the files again if they have changed; whether that was done. Raises nothing."""
        marks = self._marks_now()
        has_changed = marks != self._marks
        if has_changed:
            try:
                self._read()
            except Exception as error:
                FAILURES.add(self.name, error, "what was read before stays in use", about=tuple(marks))
                return False
        self._marks = marks
        self._current_s = self._clock.now_s()
        return has_changed

    def _marks_now(self) -> list[Mark | None]:
        return [_mark_of(path) for path in self._paths]


class Watcher:
    """A thread that looks at files, until it is closed."""

    def __init__(self, files: Sequence[WatchedFiles], every_s: float = _EVERY_S):
        self._files = list(files)
        self._every_s = every_s
        self._is_closed = threading.Event()
        if self._files:
            BackgroundThread("nestrec-files", self._turn).start()

    def close(self) -> None:
        self._is_closed.set()

    def _turn(self) -> bool:
        if self._is_closed.wait(self._every_s):
            return False
        for files in self._files:
            guarded(files.name, files.look)
        return True


def _mark_of(path: Path) -> Mark | None:
    """None where there is no such file now."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


_LOG = logging.getLogger(__name__)
Role = Literal["public", "monitor", "admin"]
_MOST_KEYS = 256
"""each is compared for each request"""
_LEAST_RATE = 1e-5
"""Smallest number of requests per second, about one per day; 1 / 1e-320 is infinite."""
_DIGEST_CHARACTERS = 64
_NAME = "must be 1 to 64 letters, digits, dots, dashes and underscores"


@config
class ApiKeyOptions:
    role: Role = "public"
    """public: what clients ask; monitor: what operators look at; admin: everything"""
    expires: str | None = None
    """from this moment (ISO 8601, with its zone) it is not taken any more"""
    requests_per_s: float | None = None
    """most requests a second in the long run; none: no limit"""
    burst: float | None = None
    """requests that may come at once; none: those of a second"""


@config
class ApiKeyEntry(ApiKeyOptions):
    """A key as the file has it."""

    name: str
    """for logs and limits; never secret"""
    sha256: str
    """digest of the key, in hexadecimal"""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that the server knows."""

    name: str
    role: Role
    digest: bytes
    expires_s: float
    """Unix seconds"""
    requests_per_s: float
    """infinite where there is no limit"""
    burst: float


class ApiKeyStore:
    """The keys of a file, as it is now. `find` may be called from any thread while another one reads the file again."""

    def __init__(self, path: Path):
        self._path = path
        self.file = WatchedFiles("keys", [path], self._read)

    def find(self, presented: bytes) -> ApiKey | None:
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


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """All keys of a file; `UserError` names what is wrong with it."""
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        remedy = "make one with: nestrec key NAME --file FILE"
        raise UserError(f"cannot be read: {error}", option="safety.keys", value=str(path), remedy=remedy) from error
    if stat.S_IMODE(mode) & stat.S_IWOTH:
        remedy = f"chmod o-w {path}"
        raise UserError("may be written by anybody", option="safety.keys", value=str(path), remedy=remedy)
    try:
        plain = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also of numbers that are too long, and of tables nested too deeply
        remedy = "fix it, or write a new one with: nestrec key NAME --file FILE"
        raise UserError(f"is not TOML: {error}", option="safety.keys", value=str(path), remedy=remedy) from error
    return keys_from(plain, str(path))


def keys_from(plain: dict[str, Any], where: str) -> tuple[ApiKey, ...]:
    """Keys of what a file holds. where: its name, for errors."""
    entries = plain.get("key", [])
    if set(plain) - {"key"} or not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise UserError("must hold [[key]] tables alone", option="safety.keys", value=where, remedy="see `nestrec key`")
    if len(entries) > _MOST_KEYS:
        remedy = f"keep at most {_MOST_KEYS} of them: each is compared for each request"
        raise UserError(f"holds {len(entries)} keys", option="safety.keys", value=where, remedy=remedy)
    keys = tuple(_key(from_plain(ApiKeyEntry, _plain_dates(entry), f"key[{i}]")) for i, entry in enumerate(entries))
    for what, values in (("name", [key.name for key in keys]), ("sha256", [key.digest for key in keys])):
        if len(set(values)) < len(values):
            raise UserError(f"has a {what} twice", option="safety.keys", value=where, remedy="give each key its own")
    return keys


def _key(entry: ApiKeyEntry) -> ApiKey:
    field = f"key {entry.name[:64]!r}"
    if not 1 <= len(entry.name) <= 64 or not all(c.isascii() and (c.isalnum() or c in "._-") for c in entry.name):
        raise UserError(_NAME, option="key.name", value=entry.name[:80], remedy="give it such a name")
    digest = entry.sha256.lower()
    if len(digest) != _DIGEST_CHARACTERS or not all(c in "0123456789abcdef" for c in digest):
        remedy = "give the SHA-256 of the key in hexadecimal; the key itself does not belong into the file"
        raise UserError("is no digest", option=f"{field}: sha256", value="(not shown)", remedy=remedy)
    rate = float("inf") if entry.requests_per_s is None else entry.requests_per_s
    burst = max(1.0, rate) if entry.burst is None else entry.burst
    if not rate >= _LEAST_RATE or not burst >= 1.0:
        remedy = f"give a rate of {_LEAST_RATE} or more and a burst of 1 or more, or leave them out"
        raise UserError("lets nothing through", option=field, value=(entry.requests_per_s, entry.burst), remedy=remedy)
    return ApiKey(entry.name, entry.role, bytes.fromhex(digest), expiry_s(entry.expires, field), rate, burst)


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
        raise UserError("is no moment", option=f"{field}: expires", value=text[:80], remedy=remedy)
    return moment.timestamp()


def new_entry(entry: ApiKeyEntry) -> str:
    """An entry as text that can be added to a file."""
    _key(entry)
    lines = ["[[key]]", f'name = "{entry.name}"', f'role = "{entry.role}"', f'sha256 = "{entry.sha256}"']
    lines += [f'expires = "{entry.expires}"'] if entry.expires is not None else []
    lines += [f"requests_per_s = {entry.requests_per_s}"] if entry.requests_per_s is not None else []
    lines += [f"burst = {entry.burst}"] if entry.burst is not None else []
    return "\n".join(lines) + "\n"


def add_entry(path: Path, entry: ApiKeyEntry) -> None:
    """Add a key to a file, which nobody but its owner may read; whoever reads it sees the old one or the new one."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    text = (before.rstrip() + "\n\n" if before.strip() else "") + new_entry(entry)
    keys_from(tomllib.loads(text), str(path))
    write_atomic(path, text, mode=0o600)


def _plain_dates(entry: dict[str, Any]) -> dict[str, Any]:
    """TOML has moments of its own."""
    return {name: v.isoformat() if isinstance(v, datetime.date) else v for name, v in entry.items()}


def _indexed(keys: tuple[ApiKey, ...]) -> tuple[tuple[ApiKey, ...], tuple[bytes, ...]]:
    return keys, tuple(key.digest for key in keys)


Audience = Literal["anyone", "clients", "watchers", "admins"]
_ADMIN = "/v1/admin/"
"""whatever stands below it is for admins, whoever added it"""
_MAY: dict[Role, frozenset[Audience]] = {
    "public": frozenset({"anyone", "clients"}),
    "monitor": frozenset({"anyone", "watchers"}),
    "admin": frozenset({"anyone", "clients", "watchers", "admins"}),
}


class ProtectedRoute(Protocol):
    """What an endpoint says of itself."""

    @property
    def path(self) -> str: ...
    @property
    def audience(self) -> Audience: ...
    @property
    def admin(self) -> bool: ...


class AccessRules:
    """The audience of each path; one that no endpoint has is for clients, who are then told that nothing is there."""

    def __init__(self, endpoints: Iterable[ProtectedRoute], watched: Iterable[str] = ()):
        """watched: further paths that are for those who watch."""
        self._exact: dict[str, Audience] = dict.fromkeys(watched, "watchers")
        self._patterns: list[tuple[re.Pattern[str], str, Audience]] = []
        for endpoint in endpoints:
            audience: Audience = "admins" if endpoint.admin else endpoint.audience
            if "{" in endpoint.path:
                pattern = re.compile(re.sub(r"\\{\w+\\}", "([^/]*)", re.escape(endpoint.path)))
                self._patterns.append((pattern, endpoint.path, audience))
            else:
                self._exact[endpoint.path] = audience

    def audience_of(self, path: str, raw_path: str) -> Audience:
        """path: decoded. raw_path: in percent encoding, in which an id may hold any character."""
        if path.startswith(_ADMIN):
            return "admins"
        if (audience := self._exact.get(path)) is not None:
            return audience
        return next((audience for pattern, _, audience in self._patterns if pattern.fullmatch(raw_path)), "clients")

    def route_of(self, path: str, raw_path: str) -> str:
        """The route as it is declared, which holds no id; `other` for what is no route."""
        if path in self._exact:
            return path
        return next((route for pattern, route, _ in self._patterns if pattern.fullmatch(raw_path)), "other")


def may(role: Role, audience: Audience) -> bool:
    return audience in _MAY[role]
