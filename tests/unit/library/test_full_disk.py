"""A full disk ends a command with an error that names the path, and leaves no incomplete files."""

import contextlib
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.data.formats.format_registry import prepare
from nestrec.exporters.servable_writer import write_servable
from nestrec.inference.recommender import Recommender
from nestrec.models import HSTUConfig
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.served_tables import allocate_mapped
from nestrec_bench.harness.random_model import random_retrieval


@contextlib.contextmanager
def limit_file_size(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    writes_no_bytecode = sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # Python would truncate bytecode files without an error, and fail to read them later
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = writes_no_bytecode


@pytest.fixture(scope="module")
def servable() -> Servable:
    return random_retrieval(HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=8), num_items=200)


def test_full_disk_prepare_names_fix(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item\n" + "ann,7\n" * 100)
    (tmp_path / "out").mkdir()
    prepare(
        "log", tmp_path / "log.csv", tmp_path / "out" / "first"
    )  # compiles loops first, because their cache is on the disk, too
    with (
        limit_file_size(1000),
        pytest.raises(UserError, match=r"(?s)output=.*data: cannot be written.*Free"),
    ):
        prepare("log", tmp_path / "log.csv", tmp_path / "out" / "data")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["first"]


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda servable, folder: write_servable(servable, folder / "model"), "OUT=.*model: cannot be written"),
        (
            lambda servable, folder: Recommender(servable).batch().embed_items(str(folder / "v.npy")),
            "output=.*v.npy",
        ),
        (
            lambda servable, folder: allocate_mapped(folder, 1000, 16, torch.float32),
            "folder=.*cannot hold 64,000 bytes",
        ),
    ],
    ids=["export", "vectors", "disk store"],
)
def test_full_disk_export_names_fix(
    servable: Servable, tmp_path: Path, write: Callable[[Servable, Path], object], message: str
) -> None:
    with limit_file_size(1000), pytest.raises(UserError, match=rf"(?s){message}.*Free"):
        write(servable, tmp_path)
    assert not [*tmp_path.iterdir()]
