"""API key files, comparison of API keys and rate limits."""

import contextlib
import hmac
import random
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nestrec.base.errors import UserError
from nestrec.cli.app import app
from nestrec.serving.core.asgi import retry_after
from nestrec.serving.security.auth import (
    AccessRules,
    ApiKey,
    ApiKeyEntry,
    ApiKeyStore,
    add_entry,
    digest_of,
    find_key,
    generate_key,
    read_keys,
)
from nestrec.serving.security.rate_limiter import LocalRateLimiter
from nestrec.serving.security.server_security import RequestAuthorizer
from nestrec_bench.harness.clocks import ManualClock

DIGEST = "ab" * 32


def measure_ns(compare, guess, stored, num_calls=40):
    """Return the time of a number of comparisons.

    Both guesses must use this function: two copies of the same code differ by more than the expected difference.
    """
    start_ns = time.perf_counter_ns()
    for _ in range(num_calls):
        compare(guess, stored)
    return time.perf_counter_ns() - start_ns


def has_timing_difference(compare, right, num_blocks=300):
    """Return whether a guess with a correct start takes a different time than one with a wrong start, at five sigma.

    This is a sign test of pairs measured directly after each other, so that a busy machine affects both alike. Both
    guesses are first, and in each of the two buffers, equally often: buffers differ by nanoseconds during a test.
    """
    near = right[:-1] + b"?"
    far = b"?" + right[1:]
    stored = [digest_of(right)]
    num_slower = 0
    buffers = bytearray(near), bytearray(far)
    for block in range(num_blocks):
        is_far_first = block % 2
        is_swapped = block // 2 % 2
        buffers[is_swapped][:] = near
        buffers[1 - is_swapped][:] = far
        elapsed_ns = {}
        for is_far in (is_far_first, 1 - is_far_first):
            elapsed_ns[is_far] = measure_ns(compare, buffers[is_swapped ^ is_far], stored)
        num_slower += elapsed_ns[0] > elapsed_ns[1]
    return abs(num_slower - num_blocks / 2) > 5 * (num_blocks / 4) ** 0.5


def test_api_key_check_is_constant_time():
    right = generate_key().encode()
    assert find_key(right, [digest_of(b"other"), digest_of(right)]) == 1

    def naive(guess, _):
        for a, b in zip(guess, right, strict=True):
            if a != b:
                return None
        return 0

    assert has_timing_difference(naive, right), "the test must detect a comparison that ends at the first difference"
    # A pause of the machine in the middle of a pair decides it randomly; three results of five sigma are not random.
    assert not all(has_timing_difference(find_key, right) for _ in range(3))


def test_api_key_check_compares_all_digests(monkeypatch):
    keys = [generate_key().encode() for _ in range(4)]
    digests, compared = [digest_of(key) for key in keys], []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(b) or real(a, b))
    assert [find_key(key, digests) for key in (*keys, b"unknown")] == [0, 1, 2, 3, None]
    assert len(compared) == 5 * 4


def test_create_key_prints_key_and_stores_digest(tmp_path):
    path = tmp_path / "keys.toml"
    runner = CliRunner()
    made = runner.invoke(app, ["create-key", "shop", "--file", str(path), "--requests_per_s", "5"])
    admin = runner.invoke(
        app, ["create-key", "ann", "--file", str(path), "--role", "admin", "--expires_at", "2900-01-01T00:00Z"]
    )
    assert made.exit_code == admin.exit_code == 0, (made.output, admin.output)
    key = made.stdout.splitlines()[0]
    assert key not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    ring = ApiKeyStore(path)
    found = ring.find(key.encode())
    assert (found.name, found.role, found.requests_per_s, found.burst) == ("shop", "public", 5.0, 5.0)
    assert ring.find(admin.stdout.splitlines()[0].encode()).expires_s == 29348006400.0
    assert ring.find(key.encode() + b"x") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("".join(f"[[key]]\nname = 'a{i}'\nsha256 = '{i:064x}'\n" for i in range(257)), "contains 257 keys"),
        ("[[key]]\nname = 'a'", "sha256"),
        (f"[[key]]\nname = 'a b'\nsha256 = '{DIGEST}'", "letters, digits"),
        ("[[key]]\nname = 'a'\nsha256 = 'nr_a-key-as-it-is'", "64 hexadecimal digits"),
        (f"[[key]]\nname = 'a'\nsha256 = '{DIGEST}'\nrole = 'root'", "role"),
        (f"[[key]]\nname = 'a'\nsha256 = '{DIGEST}'\nexpires = 2027-01-01", "must be a time in ISO 8601"),
        (f"[[key]]\nname = 'a'\nsha256 = '{DIGEST}'\nrequests_per_s = 0", "rejects all requests"),
        (f"[[key]]\nname = 'a'\nsha256 = '{DIGEST}'\nrequests_per_s = 1e-320", "rejects all requests"),
        (f"[[key]]\nname = 'a'\nsha256 = '{DIGEST}'\nrequests_per_s = {'9' * 400}", "too large"),
        (f"[[key]]\nname = 'a'\nsha256 = '{DIGEST}'\nburst = {'9' * 5_000}", "is not TOML"),
        (f"key = {'[' * 5_000}{']' * 5_000}", "is not TOML"),
        (f"key = {'[' * 5_000}", "is not TOML"),
        (f"[[key]]\nname = 'a'\nsha256 = '{DIGEST}'\nexpires = 07:32:00", "expires"),
        (f"[[key]]\nname = 'a'\nsha256 = '{DIGEST}'\n" * 2, "two keys have the same name"),
        (f"key = 1\n[other]\nname = '{DIGEST}'", r"only \[\[key\]\] tables"),
        ("[[key", "is not TOML"),
    ],
)
def test_api_key_file_errors_are_named(tmp_path, text, message):
    (tmp_path / "keys.toml").write_text(text)
    with pytest.raises(UserError, match=message) as raised:
        read_keys(tmp_path / "keys.toml")
    assert "nr_a-key-as-it-is" not in str(raised.value)


def test_api_key_file_must_not_be_world_writable(tmp_path):
    path = tmp_path / "keys.toml"
    add_entry(path, ApiKeyEntry(name="a", sha256=DIGEST))
    path.chmod(0o666)
    with pytest.raises(UserError, match=r"is writable by all users(.|\n)*chmod o-w"):
        read_keys(path)


def test_api_key_file_reload_keeps_keys_of_broken_file(tmp_path):
    def write(folder: Path, *names: str) -> Path:
        for name in names:
            folder.mkdir(exist_ok=True)
            add_entry(folder / "keys.toml", ApiKeyEntry(name=name, sha256=digest_of(name.encode()).hex()))
        return folder

    now = tmp_path / "now"
    now.symlink_to(write(tmp_path / "1", "first"))
    ring = ApiKeyStore(now / "keys.toml")
    assert not ring.reload_if_changed()
    now.unlink()
    now.symlink_to(write(tmp_path / "2", "first", "second"))
    assert ring.reload_if_changed()
    assert ring.find(b"second").name == "second"
    now.unlink()
    assert not ring.reload_if_changed(), "known keys must remain valid"
    assert ring.find(b"second").name == "second"


def test_rate_limit_token_bucket_burst_then_rate():
    clock = ManualClock()
    rates = LocalRateLimiter(clock)
    key = ApiKey("a", "public", b"", float("inf"), 2.0, 3.0)
    assert [rates.wait_s(key) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    clock.sleep(0.5)
    assert [rates.wait_s(key) for _ in range(2)] == [0.0, 0.5]
    clock.sleep(100.0)
    assert [rates.wait_s(key) > 0 for _ in range(4)] == [False, False, False, True]
    unbounded = ApiKey("b", "public", b"", float("inf"), float("inf"), float("inf"))
    assert not any(rates.wait_s(unbounded) for _ in range(100))


@pytest.mark.parametrize(
    "text",
    [
        f"[[key]]\nname = 'a'\nsha256 = '{DIGEST}'\nrequests_per_s = {'9' * 400}",
        f"key = {'[' * 5_000}{']' * 5_000}",
        "\x00",
    ],
)
def test_api_key_removed_after_invalid_file_is_rejected(tmp_path, text):
    path = tmp_path / "keys.toml"
    for name in ("first", "second"):
        add_entry(path, ApiKeyEntry(name=name, sha256=digest_of(name.encode()).hex()))
    ring = ApiKeyStore(path)
    path.write_text(text)
    assert not ring.reload_if_changed()
    assert ring.find(b"second").name == "second"
    path.unlink()
    add_entry(path, ApiKeyEntry(name="first", sha256=digest_of(b"first").hex()))
    assert ring.reload_if_changed()
    assert ring.find(b"second") is None


@pytest.mark.parametrize("text", ["", "\n# no key\n", "key = []"])
def test_api_key_file_without_keys_rejects_every_key(tmp_path, text, caplog):
    path = tmp_path / "keys.toml"
    add_entry(path, ApiKeyEntry(name="last", sha256=digest_of(b"last").hex()))
    ring = ApiKeyStore(path)
    path.write_text(text)
    assert ring.reload_if_changed()
    assert ring.find(b"last") is None
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "contains no API keys" in record.getMessage()
    gate = RequestAuthorizer(AccessRules(()), ApiKeyStore(path))
    assert gate.authorize("/v1/rank", "/v1/rank", [(b"x-api-key", b"last")], "10.0.0.1").rejection.status == 401


def test_api_key_file_fuzzing_raises_user_errors_only(tmp_path):
    rng = random.Random(5)
    path = tmp_path / "keys.toml"
    valid = f"[[key]]\nname = 'a'\nsha256 = '{DIGEST}'\nrole = 'admin'\nexpires = 2900-01-01T00:00:00Z\n"
    tokens = ["inf", "nan", "-1", "9" * 400, "9" * 5_000, "1e-320", "[" * 3_000, "''", "true", "[]", "{}", "0001-01-01",
              "9999-12-31T23:59:59-23:59",
              "'0001-01-01T00:00:00+23:59'", "07:00:00", "\x00", "\ufeff", "\u202e"]  # fmt: skip
    names = ("name", "sha256", "role", "expires", "requests_per_s", "burst", "key.a", "[key]", "[[key]]")
    for _ in range(250):
        text = valid
        for _ in range(rng.randint(1, 3)):
            start = rng.randrange(len(text))
            addition = rng.choice([f"\n{rng.choice(names)} = {rng.choice(tokens)}\n", rng.choice(tokens), valid, ""])
            text = text[:start] + addition + text[start + rng.randint(0, 20) :]
        path.write_text(text)
        with contextlib.suppress(UserError):
            for key in read_keys(path):
                assert LocalRateLimiter(ManualClock()).wait_s(key) < 1e6


def test_rate_limit_of_tiny_rate_has_retry_after():
    clock = ManualClock()
    rates = LocalRateLimiter(clock)
    key = ApiKey("a", "public", b"", float("inf"), 1e-320, 1.0)
    assert [rates.wait_s(key) for _ in range(2)] == [0.0, float("inf")]
    assert retry_after(float("inf")) == (b"retry-after", b"86400")
    assert retry_after(1e-9) == (b"retry-after", b"1")
