"""The wheel: it holds all that the package needs, and runs where there is no checkout."""

import email
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command, **named):
    named.setdefault("timeout", 250)
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **named)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: setuptools leaves folders of its own beside what it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "nestrec", source / "nestrec", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        folder,
        source,
    )
    (path,) = folder.glob("*.whl")
    return path


def metadata_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        (entry_points,) = [archive.read(n).decode() for n in archive.namelist() if n.endswith("entry_points.txt")]
    files = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "nestrec").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == files
    assert "nestrec/planning/clusters/h100-ib400.toml" in held
    assert "nestrec = nestrec.cli.app:main" in entry_points


def test_extras_say_what_they_bring(wheel):
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    metadata = metadata_of(wheel)
    assert set(metadata.get_all("Provides-Extra")) == set(declared)
    described = (ROOT / "docs" / "operating.md").read_text()
    assert all(f"`{extra}`" in described for extra in declared)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_wheel_runs_in_an_empty_environment_with_each_extra(wheel, tmp_path):
    """What `deploy/try_wheel.py` does; its figures stand in docs/results/wheel.json."""
    script = ROOT / "deploy" / "try_wheel.py"
    run(sys.executable, script, "--wheel", wheel, "--folder", tmp_path / "try", cwd=tmp_path, timeout=7000)
