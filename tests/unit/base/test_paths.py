"""Paths from the user are checked before anything is written."""

import os
from pathlib import Path

import pytest

from nestrec.base.errors import UserError
from nestrec.base.files import check_file, check_folder

UNPRIVILEGED_USER = 65534


def check_folder_unprivileged(folder: Path) -> str:
    """Return the error of `check_folder` in a child process, without root privileges if this process has them."""
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        try:
            if os.geteuid() == 0:
                os.setuid(UNPRIVILEGED_USER)
            check_folder(folder, "--output")
        except UserError as error:
            os.write(writes, str(error).encode())
        finally:
            os._exit(0)
    os.close(writes)
    os.waitpid(child, 0)
    with os.fdopen(reads) as error_text:
        return error_text.read()


@pytest.mark.parametrize("inner", ["", "run"])
def test_check_folder_names_read_only_folder(tmp_path: Path, inner: str) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o555)
    message = check_folder_unprivileged(folder / inner)
    assert message.startswith(f"--output={folder / inner}: cannot be written: no permission in ")
    assert "Use another folder, or change the permissions" in message


def test_check_folder_accepts_existing_or_creatable_folder(tmp_path: Path) -> None:
    check_folder(tmp_path, "--output")
    check_folder(tmp_path / "new" / "deeper", "--output")
    assert check_file(tmp_path / "new" / "file.json") == tmp_path / "new" / "file.json"
    with pytest.raises(UserError, match="is a folder"):
        check_file(tmp_path)
