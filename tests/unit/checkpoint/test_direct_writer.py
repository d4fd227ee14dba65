"""Direct writes, which bypass the page cache, write the exact bytes on every file system."""

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

BLOCK = 16 << 10
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no O_DIRECT")


def reject_direct_flag(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    original = fcntl.fcntl
    rejected = []

    def control(descriptor: int, command: int, *arguments: int) -> int:
        if command == fcntl.F_SETFL and arguments[0] & os.O_DIRECT:
            rejected.append(descriptor)
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(descriptor, command, *arguments)

    monkeypatch.setattr(fcntl, "fcntl", control)
    return lambda: bool(rejected)


def reject_direct_writes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Fail direct writes from the second block on."""
    original = os.write
    sizes = []

    def write(descriptor: int, block: memoryview) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            sizes.append(len(block))
            if len(sizes) > 1:
                raise OSError(errno.EINVAL, "Invalid argument")
        return original(descriptor, block)

    monkeypatch.setattr(os, "write", write)
    return lambda: len(sizes) > 1


def write_partially(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Write only a part of a block, as on an almost full disk, so that the rest starts at an unaligned offset."""
    original = os.write
    cut = []

    def write(descriptor: int, block: memoryview) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT and len(block) > 1000:
            cut.append(descriptor)
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags ^ os.O_DIRECT)
            written = original(descriptor, block[:1000])
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
            return written
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(descriptor, block)

    monkeypatch.setattr(os, "write", write)
    return lambda: bool(cut)


@pytest.mark.parametrize("kind", ["supported", reject_direct_flag, reject_direct_writes, write_partially])
def test_direct_writer_writes_exact_bytes(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(atomic_files, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(atomic_files, "_THREAD_LOCAL", threading.local())  # buffers of that size
    has_happened = None if isinstance(kind, str) else kind(monkeypatch)
    draw = np.random.default_rng(1)
    number = 0
    for pieces in range(4):
        for more in (0, 1, 4095, 4096, 4097, BLOCK - 1):
            content = draw.bytes(pieces * BLOCK + more)
            cuts = [0, *sorted(draw.integers(0, len(content) + 1, number % 5)), len(content)]
            parts = [memoryview(content)[a:b] for a, b in itertools.pairwise(cuts)]
            path = tmp_path / str(number)
            assert write_file(path, iter(parts), direct_io=True) == (len(content), hashlib.sha256(content).hexdigest())
            assert path.read_bytes() == content
            number += 1
    if has_happened is not None and has_direct_writes(tmp_path / "probe"):
        assert has_happened()


def test_direct_writer_bypasses_page_cache(tmp_path):
    if not has_direct_writes(tmp_path / "probe"):
        pytest.skip("this file system caches all files")
    content = memoryview(np.random.default_rng(1).bytes(2 * atomic_files.BLOCK_BYTES + 10_000))
    write_file(tmp_path / "cached", iter([content]))
    write_file(tmp_path / "direct", iter([content]), direct_io=True)
    assert is_cached(tmp_path / "cached")
    assert not is_cached(tmp_path / "direct")


def test_direct_writer_raises_disk_errors(tmp_path, monkeypatch):
    def full(descriptor: int, block: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write_file(tmp_path / "file", iter([memoryview(bytes(atomic_files.BLOCK_BYTES))]), direct_io=True)


def has_direct_writes(path: Path) -> bool:
    """Return whether this file system supports writes that bypass the page cache."""
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
    """Return whether the first page of a file is in the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(descriptor, [bytearray(4096)], 0, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
