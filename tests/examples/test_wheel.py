"""The wheel contains all files of the package and runs without a checkout."""

import email
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command, **options):
    options.setdefault("timeout", 250)
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy, because setuptools writes folders into the source."""
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


def test_wheel_contains_exactly_the_package(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packaged = {name for name in archive.namelist() if ".dist-info/" not in name}
        (entry_points,) = [archive.read(n).decode() for n in archive.namelist() if n.endswith("entry_points.txt")]
    files = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "nestrec").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packaged == files
    assert "nestrec/planning/clusters/h100-ib400.toml" in packaged
    assert "nestrec = nestrec.cli.app:main" in entry_points


def test_wheel_extras_are_documented(wheel):
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    metadata = metadata_of(wheel)
    assert set(metadata.get_all("Provides-Extra")) == set(declared)
    described = (ROOT / "docs" / "get-started" / "installation.md").read_text()
    assert all(f"`{extra}`" in described for extra in declared)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_wheel_runs_in_empty_environment_with_each_extra(wheel, tmp_path):
    """Run `deploy/try_wheel.py`; its results are in docs/results/wheel.json."""
    script = ROOT / "deploy" / "try_wheel.py"
    run(sys.executable, script, "--wheel", wheel, "--folder", tmp_path / "try", cwd=tmp_path, timeout=7000)
