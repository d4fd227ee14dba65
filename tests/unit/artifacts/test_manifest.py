"""Manifests that contain their own digest, and files that are verified against a manifest."""

import hashlib
from pathlib import Path

import pytest
import torch

from nestrec.artifacts.atomic_files import safetensors_content
from nestrec.artifacts.manifest import (
    FileDigest,
    VerifiedReads,
    decode_sealed,
    dump_with_digest,
    file_problem,
    load_with_digest,
)
from nestrec.artifacts.storage import LocalStorage
from nestrec.base.errors import CorruptFileError
from nestrec.checkpoint.checkpoint_manifest import Manifest
from nestrec.serving.versions.version_manifest import NewestPointer


def corrupt_error(where: str, problem: str) -> CorruptFileError:
    return CorruptFileError(problem, option="artifact", value=where)


def entry_of(name: str, content: bytes) -> FileDigest:
    return FileDigest(name=name, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def test_load_with_digest_rejects_changed_bytes() -> None:
    content = dump_with_digest({"step": 1, "name": "x"})
    assert load_with_digest(bytearray(content)) == {"step": 1, "name": "x"}
    for at in range(len(content)):
        changed = bytes([*content[:at], content[at] ^ 1, *content[at + 1 :]])
        with pytest.raises(ValueError, match=r"."):
            load_with_digest(changed)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"[]", "not a JSON object with a digest"),
        (b"{}", "does not match its digest"),
        (dump_with_digest({"format": 2}), "the format is 2, but this version reads 1"),
        (dump_with_digest({"format": 1, "folder": "x"}), "cannot be read"),
    ],
)
def test_decode_sealed_error_describes_corruption(content: bytes, problem: str) -> None:
    with pytest.raises(CorruptFileError, match=problem):
        decode_sealed(NewestPointer, content, "newest.json", version=1, make_error=corrupt_error)


def test_decode_sealed_rejects_files_outside_folder() -> None:
    entry = {"name": "../x", "bytes": 1, "sha256": "0", "kind": "state", "table": None, "shard": 0, "num_shards": 1}
    content = dump_with_digest({"format": 1, "step": 1, "num_ranks": 1, "files": [entry]})
    with pytest.raises(CorruptFileError, match="outside"):
        decode_sealed(Manifest, content, "step-00000001", version=1, make_error=corrupt_error)


@pytest.mark.parametrize(
    ("content", "problem"), [(b"abd", "the content does not match"), (b"ab", "2 bytes instead of 3")]
)
def test_verified_reads_reject_corrupt_content(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "rows").write_bytes(content)
    entry = entry_of("rows", b"abc")
    with pytest.raises(CorruptFileError, match=problem) as caught:
        VerifiedReads(LocalStorage(tmp_path.parent), corrupt_error).content(tmp_path.name, entry)
    assert caught.value.value == f"{tmp_path.name}/rows"
    assert problem in (file_problem(tmp_path / "rows", entry) or "")


def test_verified_reads_separate_corruption_from_io_errors(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    entry = entry_of("rows", b"abc")
    with pytest.raises(CorruptFileError, match="cannot be read: No such file"):
        VerifiedReads(storage, corrupt_error).content("step", entry)
    (tmp_path / "step").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        VerifiedReads(storage, corrupt_error).content("step", entry)
    with pytest.raises(CorruptFileError, match="cannot be read: Not a directory"):
        VerifiedReads(storage, corrupt_error, unreadable=(OSError,)).content("step", entry)


def test_verified_tensors_equal_written_tensors(tmp_path: Path) -> None:
    tensors = {"keys": torch.arange(3), "weight": torch.ones(3, 2, dtype=torch.bfloat16), "none": torch.empty(0, 4)}
    content = b"".join(safetensors_content(tensors))
    (tmp_path / "rows").write_bytes(content)
    tensors_read = VerifiedReads(LocalStorage(tmp_path), corrupt_error).tensors(".", entry_of("rows", content))
    assert tensors_read.keys() == tensors.keys()
    assert all(torch.equal(tensors_read[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("content", [b"", b"not safetensors", b"\x02\x00\x00\x00\x00\x00\x00\x00[]"])
def test_verified_tensors_reject_other_formats(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows").write_bytes(content)
    with pytest.raises(CorruptFileError, match="is not in safetensors format"):
        VerifiedReads(LocalStorage(tmp_path), corrupt_error).tensors(".", entry_of("rows", content))
