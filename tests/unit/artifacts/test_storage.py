"""Storage backends: common behavior, and backends of other packages."""

import secrets
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import pytest

from nestrec.artifacts import storage as module
from nestrec.artifacts.storage import FsspecStorage, LocalStorage, RetriedReads, Storage, storage_of
from nestrec.base import plugins
from nestrec.base.plugins import PluginRegistry


@pytest.fixture(params=["local", "file", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    name = secrets.token_hex(4)
    local = {"local": str(tmp_path), "file": f"file://{tmp_path}"}
    yield storage_of(local.get(request.param, f"memory://{name}"))
    if request.param == "memory" and fsspec.filesystem("memory").exists(f"/{name}"):
        fsspec.filesystem("memory").rm(f"/{name}", recursive=True)


def test_storage_round_trip(storage: Storage) -> None:
    written = storage.write("versions/1/rows", iter([memoryview(b"ab"), memoryview(b"c")]))
    assert written == (3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    storage.replace("newest.json", b"old")
    storage.replace("newest.json", b"new")
    assert storage.read("versions/1/rows") == b"abc"
    assert storage.read("newest.json") == b"new"
    assert storage.list_folders("versions") == ["1"]
    storage.remove("versions/1")
    storage.remove("versions/1")
    assert storage.list_folders("versions") == []
    with pytest.raises(FileNotFoundError):
        storage.read("versions/1/rows")


def test_local_storage_reads_empty_and_growing_files(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert LocalStorage(tmp_path).read("empty") == b""
    status = LocalStorage(Path("/proc/self")).read("status")  # its size is 0 before it is read
    assert status.startswith(b"Name:")


def test_local_storage_commit_renames_folder(tmp_path: Path) -> None:
    local = LocalStorage(tmp_path)
    local.write("step.partial/rows", iter([memoryview(b"x")]))
    local.commit_folder("step.partial", "step")
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
    assert local.read("step/rows") == b"x"


def test_retried_reads_stop_at_file_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_AFTER_S", (0.0, 0.0))
    names_read = list[str]()

    class Failing(LocalStorage):
        def read(self, name: str) -> bytearray:
            names_read.append(name)
            if len(names_read) < 3:
                raise OSError(5, "the storage does not respond")
            raise FileNotFoundError(name)

    with pytest.raises(FileNotFoundError):
        RetriedReads(Failing(Path("."))).read("x")
    assert names_read == ["x"] * 3


def test_storage_of_uses_plugin_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint(name="mine", value=f"{__name__}:backend", group="nestrec.storage")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == point.group else [])
    monkeypatch.setattr(
        module, "BACKENDS", PluginRegistry("nestrec.storage", "storage backend", {}, of=module.BACKENDS._of)
    )
    assert storage_of("mine://bucket/run").address == "mine://bucket/run"
    assert isinstance(storage_of("memory://bucket/run"), FsspecStorage)


def backend(address: str) -> Storage:
    storage = LocalStorage(Path("."))
    storage.address = address
    return storage
