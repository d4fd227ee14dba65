"""Paths that a user names are looked at before anything is written."""

import os
from pathlib import Path

import pytest

from nestrec.base.errors import UserError
from nestrec.base.files import check_file, check_folder

NOBODY = 65534


def told_to_nobody(folder: Path) -> str:
    """What another process hears of a folder; of nobody's where this one is of root, who may write everywhere."""
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        try:
            if os.geteuid() == 0:
                os.setuid(NOBODY)
            check_folder(folder, "--output")
        except UserError as error:
            os.write(writes, str(error).encode())
        finally:
            os._exit(0)
    os.close(writes)
    os.waitpid(child, 0)
    with os.fdopen(reads) as told:
        return told.read()


@pytest.mark.parametrize("inner", ["", "run"])
def test_a_folder_that_may_only_be_read_is_named_with_a_remedy(tmp_path: Path, inner: str) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o555)
    told = told_to_nobody(folder / inner)
    assert told.startswith(f"--output={folder / inner}: cannot be written: no permission in ")
    assert "remedy: name another folder, or change its permissions" in told


def test_a_folder_that_is_there_or_could_be_made_is_taken(tmp_path: Path) -> None:
    check_folder(tmp_path, "--output")
    check_folder(tmp_path / "new" / "deeper", "--output")
    assert check_file(tmp_path / "new" / "file.json") == tmp_path / "new" / "file.json"
    with pytest.raises(UserError, match="is a folder"):
        check_file(tmp_path)
