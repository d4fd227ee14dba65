"""A disk without room ends what writes with an error that names the path, and leaves nothing half-written."""

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
from nestrec.serving.model.served_tables import mapped
from nestrec_bench.harness.random_model import random_retrieval


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    writes_no_bytecode = sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # Python cuts it short without an error, and cannot read it afterwards
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = writes_no_bytecode


@pytest.fixture(scope="module")
def servable() -> Servable:
    return random_retrieval(HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=8), num_items=200)


def test_a_log(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item\n" + "ann,7\n" * 100)
    (tmp_path / "out").mkdir()
    prepare("log", tmp_path / "log.csv", tmp_path / "out" / "first")  # compiled loops are kept on the disk too
    with (
        files_of_at_most(1000),
        pytest.raises(UserError, match=r"(?s)output=.*data: cannot be written.*Free"),
    ):
        prepare("log", tmp_path / "log.csv", tmp_path / "out" / "data")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["first"]


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda servable, folder: write_servable(servable, folder / "model"), "OUT=.*model': cannot be written"),
        (
            lambda servable, folder: Recommender(servable).batch().embed_items(str(folder / "v.npy")),
            "output = .*v.npy",
        ),
        (lambda servable, folder: mapped(folder, 1000, 16, torch.float32), "folder = .*cannot hold 64,000 bytes"),
    ],
    ids=["export", "vectors", "rows on a disk"],
)
def test_a_model(servable: Servable, tmp_path: Path, write: Callable[[Servable, Path], object], said: str) -> None:
    with files_of_at_most(1000), pytest.raises(UserError, match=rf"(?s){said}.*Free"):
        write(servable, tmp_path)
    assert not [*tmp_path.iterdir()]
