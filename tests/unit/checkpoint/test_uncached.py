"""What is written past the cache of the system is what was given, whatever the file system can do."""

import errno
import fcntl
import hashlib
import itertools
import mmap
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nestrec.artifacts import atomic_files
from nestrec.artifacts.atomic_files import write_file

PIECE = 16 << 10
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere all files go through the cache")


def refuses_the_flag(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    original = fcntl.fcntl
    refused = []

    def control(descriptor: int, command: int, *arguments: int) -> int:
        if command == fcntl.F_SETFL and arguments[0] & os.O_DIRECT:
            refused.append(descriptor)
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(descriptor, command, *arguments)

    monkeypatch.setattr(fcntl, "fcntl", control)
    return lambda: bool(refused)


def refuses_what_is_written(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """From the second piece on."""
    original = os.write
    seen = []

    def write(descriptor: int, piece: memoryview) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            seen.append(len(piece))
            if len(seen) > 1:
                raise OSError(errno.EINVAL, "Invalid argument")
        return original(descriptor, piece)

    monkeypatch.setattr(os, "write", write)
    return lambda: len(seen) > 1


def writes_odd_parts(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """As where the disk is almost full: a part, and what is left lies at an odd place."""
    original = os.write
    cut = []

    def write(descriptor: int, piece: memoryview) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT and len(piece) > 1000:
            cut.append(descriptor)
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags ^ os.O_DIRECT)
            written = original(descriptor, piece[:1000])
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
            return written
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(descriptor, piece)

    monkeypatch.setattr(os, "write", write)
    return lambda: bool(cut)


@pytest.mark.parametrize("kind", ["as it is", refuses_the_flag, refuses_what_is_written, writes_odd_parts])
def test_every_size_in_any_parts_is_written_to_the_byte(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(atomic_files, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(atomic_files, "_OF_THREAD", threading.local())  # memory of that size
    has_happened = None if isinstance(kind, str) else kind(monkeypatch)
    draw = np.random.default_rng(1)
    number = 0
    for pieces in range(4):
        for more in (0, 1, 4095, 4096, 4097, PIECE - 1):
            content = draw.bytes(pieces * PIECE + more)
            cuts = [0, *sorted(draw.integers(0, len(content) + 1, number % 5)), len(content)]
            parts = [memoryview(content)[a:b] for a, b in itertools.pairwise(cuts)]
            path = tmp_path / str(number)
            assert write_file(path, iter(parts), past_cache=True) == (len(content), hashlib.sha256(content).hexdigest())
            assert path.read_bytes() == content
            number += 1
    if has_happened is not None and can_pass(tmp_path / "probe"):
        assert has_happened()


def test_of_a_large_file_nothing_stays_in_the_cache(tmp_path):
    if not can_pass(tmp_path / "probe"):
        pytest.skip("this file system keeps files in memory whatever is asked for")
    content = memoryview(np.random.default_rng(1).bytes(2 * atomic_files.PIECE_BYTES + 10_000))
    write_file(tmp_path / "kept", iter([content]))
    write_file(tmp_path / "past", iter([content]), past_cache=True)
    assert is_cached(tmp_path / "kept")
    assert not is_cached(tmp_path / "past")


def test_an_error_of_the_disk_is_raised(tmp_path, monkeypatch):
    def full(descriptor: int, piece: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write_file(tmp_path / "file", iter([memoryview(bytes(atomic_files.PIECE_BYTES))]), past_cache=True)


def can_pass(path: Path) -> bool:
    """Whether a file here can be written so that it is not in memory afterwards."""
    page = mmap.mmap(-1, 4096)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        try:
            os.write(descriptor, page)
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return not is_cached(path)


def is_cached(path: Path) -> bool:
    """Whether the first page of a file can be read without the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(descriptor, [bytearray(4096)], 0, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
