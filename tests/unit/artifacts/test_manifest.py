"""Sealed manifests and verified files."""

import hashlib
from pathlib import Path

import pytest
import torch

from nestrec.artifacts.atomic_files import safetensors_content
from nestrec.artifacts.manifest import FileDigest, VerifiedReads, decode_sealed, file_problem, seal, unseal
from nestrec.artifacts.storage import LocalStorage
from nestrec.base.errors import CorruptFileError
from nestrec.checkpoint.checkpoint_manifest import Manifest
from nestrec.serving.versions.version_manifest import NewestPointer


def damaged(where: str, problem: str) -> CorruptFileError:
    return CorruptFileError(problem, option="artifact", value=where)


def entry_of(name: str, content: bytes) -> FileDigest:
    return FileDigest(name=name, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def test_unseal_accepts_the_bytes_of_seal_alone() -> None:
    content = seal({"step": 1, "name": "x"})
    assert unseal(bytearray(content)) == {"step": 1, "name": "x"}
    for at in range(len(content)):
        changed = bytes([*content[:at], content[at] ^ 1, *content[at + 1 :]])
        with pytest.raises(ValueError, match=r"."):
            unseal(changed)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"[]", "is not a sealed JSON object"),
        (b"{}", "does not match its own digest"),
        (seal({"format": 2}), "has format 2; this version reads 1"),
        (seal({"format": 1, "folder": "x"}), "cannot be read"),
    ],
)
def test_decode_sealed_says_what_is_damaged(content: bytes, problem: str) -> None:
    with pytest.raises(CorruptFileError, match=problem):
        decode_sealed(NewestPointer, content, "newest.json", version=1, damaged=damaged)


def test_decode_sealed_refuses_files_outside() -> None:
    entry = {"name": "../x", "bytes": 1, "sha256": "0", "kind": "state", "table": None, "shard": 0, "num_shards": 1}
    content = seal({"format": 1, "step": 1, "num_ranks": 1, "files": [entry]})
    with pytest.raises(CorruptFileError, match="outside"):
        decode_sealed(Manifest, content, "step-00000001", version=1, damaged=damaged)


@pytest.mark.parametrize(("content", "problem"), [(b"abd", "its content does not match"), (b"ab", "has 2 bytes")])
def test_verified_reads_refuse_other_content(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "rows").write_bytes(content)
    entry = entry_of("rows", b"abc")
    with pytest.raises(CorruptFileError, match=problem) as caught:
        VerifiedReads(LocalStorage(tmp_path.parent), damaged).content(tmp_path.name, entry)
    assert caught.value.value == f"{tmp_path.name}/rows"
    assert problem in (file_problem(tmp_path / "rows", entry) or "")


def test_verified_reads_tell_damage_from_a_storage_that_fails(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    entry = entry_of("rows", b"abc")
    with pytest.raises(CorruptFileError, match="cannot be read: No such file"):
        VerifiedReads(storage, damaged).content("step", entry)
    (tmp_path / "step").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        VerifiedReads(storage, damaged).content("step", entry)
    with pytest.raises(CorruptFileError, match="cannot be read: Not a directory"):
        VerifiedReads(storage, damaged, unreadable=(OSError,)).content("step", entry)


def test_verified_tensors_equal_those_written(tmp_path: Path) -> None:
    tensors = {"keys": torch.arange(3), "weight": torch.ones(3, 2, dtype=torch.bfloat16), "none": torch.empty(0, 4)}
    content = b"".join(safetensors_content(tensors))
    (tmp_path / "rows").write_bytes(content)
    found = VerifiedReads(LocalStorage(tmp_path), damaged).tensors(".", entry_of("rows", content))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("content", [b"", b"not safetensors", b"\x02\x00\x00\x00\x00\x00\x00\x00[]"])
def test_verified_tensors_refuse_another_format(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows").write_bytes(content)
    with pytest.raises(CorruptFileError, match="is not a safetensors file"):
        VerifiedReads(LocalStorage(tmp_path), damaged).tensors(".", entry_of("rows", content))
