"""Keys in files, and how one is compared with another."""

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
    new_key,
    place_of,
    read_keys,
)
from nestrec.serving.security.rate_limiter import LocalRateLimiter
from nestrec.serving.security.server_security import RequestAuthorizer
from nestrec_bench.harness.clocks import ManualClock

DIGEST = "ab" * 32


def spent_ns(compare, guess, stored, num_calls=40):
    """One piece of code for both guesses: two that read the same differ by more than what is looked for."""
    start_ns = time.perf_counter_ns()
    for _ in range(num_calls):
        compare(guess, stored)
    return time.perf_counter_ns() - start_ns


def is_told_apart(compare, right, num_blocks=300):
    """Sign test: whether a guess that begins right takes another time than one that begins wrong, at five sigma.

    By pairs that lie next to each other in time, so that a busy machine meets both of them alike. Each is
    first, and in either place of memory, as often as the other: places differ by nanoseconds, for whole runs."""
    near = right[:-1] + b"?"
    far = b"?" + right[1:]
    stored = [digest_of(right)]
    num_slower = 0
    places = bytearray(near), bytearray(far)
    for block in range(num_blocks):
        is_far_first = block % 2
        is_swapped = block // 2 % 2
        places[is_swapped][:] = near
        places[1 - is_swapped][:] = far
        spent = {}
        for is_far in (is_far_first, 1 - is_far_first):
            spent[is_far] = spent_ns(compare, places[is_swapped ^ is_far], stored)
        num_slower += spent[0] > spent[1]
    return abs(num_slower - num_blocks / 2) > 5 * (num_blocks / 4) ** 0.5


def test_a_guess_that_begins_right_takes_as_long_as_one_that_begins_wrong():
    right = new_key().encode()
    assert place_of(right, [digest_of(b"other"), digest_of(right)]) == 1

    def naive(guess, _):
        for a, b in zip(guess, right, strict=True):
            if a != b:
                return None
        return 0

    assert is_told_apart(naive, right), "the test sees a comparison that ends at the first difference"
    # A machine that is paused in the middle of a pair decides it by chance; five sigma thrice in a row are no chance.
    assert not all(is_told_apart(place_of, right) for _ in range(3))


def test_all_digests_are_compared_whichever_is_right(monkeypatch):
    keys = [new_key().encode() for _ in range(4)]
    digests, compared = [digest_of(key) for key in keys], []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(b) or real(a, b))
    assert [place_of(key, digests) for key in (*keys, b"nobody's")] == [0, 1, 2, 3, None]
    assert len(compared) == 5 * 4


def test_a_key_is_printed_once_and_its_digest_is_kept(tmp_path):
    path = tmp_path / "keys.toml"
    runner = CliRunner()
    made = runner.invoke(app, ["key", "shop", "--file", str(path), "--requests_per_s", "5"])
    other = runner.invoke(app, ["key", "ann", "--file", str(path), "--role", "admin", "--expires", "2900-01-01T00:00Z"])
    assert made.exit_code == other.exit_code == 0, (made.output, other.output)
    key = made.stdout.splitlines()[0]
    assert key not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    ring = ApiKeyStore(path)
    found = ring.find(key.encode())
    assert (found.name, found.role, found.requests_per_s, found.burst) == ("shop", "public", 5.0, 5.0)
    assert ring.find(other.stdout.splitlines()[0].encode()).expires_s == 29348006400.0
    assert ring.find(key.encode() + b"x") is None


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("".join(f"[[key]]\nname = 'a{i}'\nsha256 = '{i:064x}'\n" for i in range(257)), "holds 257 keys"),
        ("[[key]]\nname = 'a'", "sha256"),
        (f"[[key]]\nname = 'a b'\nsha256 = '{DIGEST}'", "letters, digits"),
        ("[[key]]\nname = 'a'\nsha256 = 'nr_a-key-as-it-is'", "is no digest"),
        (f"[[key]]\nname = 'a'\nsha256 = '{DIGEST}'\nrole = 'root'", "role"),
        (f"[[key]]\nname = 'a'\nsha256 = '{DIGEST}'\nexpires = 2027-01-01", "is no moment"),
        (f"[[key]]\nname = 'a'\nsha256 = '{DIGEST}'\nrequests_per_s = 0", "lets nothing through"),
        (f"[[key]]\nname = 'a'\nsha256 = '{DIGEST}'\nrequests_per_s = 1e-320", "lets nothing through"),
        (f"[[key]]\nname = 'a'\nsha256 = '{DIGEST}'\nrequests_per_s = {'9' * 400}", "too large"),
        (f"[[key]]\nname = 'a'\nsha256 = '{DIGEST}'\nburst = {'9' * 5_000}", "is not TOML"),
        (f"key = {'[' * 5_000}{']' * 5_000}", "is not TOML"),
        (f"key = {'[' * 5_000}", "is not TOML"),
        (f"[[key]]\nname = 'a'\nsha256 = '{DIGEST}'\nexpires = 07:32:00", "expires"),
        (f"[[key]]\nname = 'a'\nsha256 = '{DIGEST}'\n" * 2, "has a name twice"),
        (f"key = 1\n[other]\nname = '{DIGEST}'", r"\[\[key\]\] tables alone"),
        ("[[key", "is not TOML"),
    ],
)
def test_a_file_of_keys_that_will_not_do_is_told(tmp_path, text, wrong):
    (tmp_path / "keys.toml").write_text(text)
    with pytest.raises(UserError, match=wrong) as told:
        read_keys(tmp_path / "keys.toml")
    assert "nr_a-key-as-it-is" not in str(told.value)


def test_a_file_that_anybody_may_write_is_no_file_of_keys(tmp_path):
    path = tmp_path / "keys.toml"
    add_entry(path, ApiKeyEntry(name="a", sha256=DIGEST))
    path.chmod(0o666)
    with pytest.raises(UserError, match=r"may be written by anybody(.|\n)*chmod o-w"):
        read_keys(path)


def test_a_file_behind_a_link_is_read_again_and_a_broken_one_is_not_taken(tmp_path):
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
    assert not ring.reload_if_changed(), "the keys that are known stay"
    assert ring.find(b"second").name == "second"


def test_a_bucket_gives_its_burst_and_then_its_rate():
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
def test_key_removed_after_a_bad_file_is_rejected(tmp_path, text):
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
def test_empty_key_file_rejects_every_key(tmp_path, text, caplog):
    path = tmp_path / "keys.toml"
    add_entry(path, ApiKeyEntry(name="last", sha256=digest_of(b"last").hex()))
    ring = ApiKeyStore(path)
    path.write_text(text)
    assert ring.reload_if_changed()
    assert ring.find(b"last") is None
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "contains no key" in record.getMessage()
    gate = RequestAuthorizer(AccessRules(()), ApiKeyStore(path))
    assert gate.admit("/v1/rank", "/v1/rank", [(b"x-api-key", b"last")], "10.0.0.1").refused.status == 401


def test_fuzzed_key_files_raise_user_errors_only(tmp_path):
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


def test_slowest_rate_gives_a_time_to_retry():
    clock = ManualClock()
    rates = LocalRateLimiter(clock)
    key = ApiKey("a", "public", b"", float("inf"), 1e-320, 1.0)
    assert [rates.wait_s(key) for _ in range(2)] == [0.0, float("inf")]
    assert retry_after(float("inf")) == (b"retry-after", b"86400")
    assert retry_after(1e-9) == (b"retry-after", b"1")
