import importlib.metadata
import os
import re
import shutil
import tomllib
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from nestrec.base.lazy import install_extra
from nestrec.report import doctor
from nestrec.report import doctor as probes
from nestrec.report.doctor import Finding, doctor_table, examine

ROOT = Path(__file__).resolve().parents[3]


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_doctor_reports_test_requirements_as_working() -> None:
    found = by_name(examine())
    for name in ("Python", "PyTorch", "CPU", "numba", "pyarrow", "Gloo", "TensorBoard", "Serving"):
        assert found[name].status == "ok", found[name]
        assert found[name].remedy == ""
    assert {"CUDA", "Triton", "NCCL", "Symmetric memory", "Limited links", "Disk", "TorchRec", "Ray"} <= found.keys()
    assert all(finding.remedy for finding in found.values() if finding.status != "ok")


def test_doctor_serving_requires_all_of_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "SERVING_PACKAGES", ("json", "no_such_package"))
    with pytest.raises(probes.NotInstalledError, match="no_such_package is not installed"):
        probes.serving()


def test_doctor_distinguishes_broken_from_absent_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise ZeroDivisionError("first line\nsecond line")

    def absent() -> str:
        raise probes.NotInstalledError("not installed")

    checks = [doctor._Check("a", broken, "fix it"), doctor._Check("b", absent, "install it", True)]
    monkeypatch.setattr(doctor, "_CHECKS", checks)
    assert examine() == [
        Finding(name="a", status="broken", detail="ZeroDivisionError: first line", remedy="fix it"),
        Finding(name="b", status="absent", detail="not installed", remedy="install it"),
    ]


def test_doctor_reports_failing_import_as_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('wrong build')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="wrong build"):
        probes.ray()


def test_doctor_remedies_name_existing_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    hints = {check.name: check.remedy for check in doctor._CHECKS}
    named = {
        name: re.findall(r"in a clone of the repository: pip install '\.\[(\w+)\]'", hint)
        for name, hint in hints.items()
    }
    assert {name: found for name, found in named.items() if found} == {
        "Serving": ["serve"],
        "Ray": ["ray"],
        **{f"Extra {name}": [name] for name in probes.EXTRAS},
    }
    assert extras.keys() - {"docs", "dev"} == {"serve", "ray", *probes.EXTRAS}
    for name, distributions in probes.EXTRAS.items():
        assert sorted(re.split(r"[<>=]", needed)[0] for needed in extras[name]) == sorted(distributions)


def test_doctor_finds_extras_and_names_missing_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probes.extra("client").startswith("httpx ")
    monkeypatch.setitem(probes.EXTRAS, "client", ("httpx", "no-such-package"))
    with pytest.raises(probes.NotInstalledError, match="no-such-package is not installed"):
        probes.extra("client")


def test_doctor_limited_links_need_root_and_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(probes.NotInstalledError, match="not root"):
        probes.limited_links()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else name)
    with pytest.raises(probes.NotInstalledError, match="command not found: tc"):
        probes.limited_links()


def test_doctor_table_shows_remedies_on_narrow_terminal() -> None:
    findings = [Finding(name="Ray", status="absent", detail="not installed", remedy=install_extra("ray"))]
    file = StringIO()
    Console(file=file, width=60).print(doctor_table(findings))
    assert "absent" in file.getvalue()
    assert "install '.[ray]'" in file.getvalue()


def test_doctor_checks_the_benchmark_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probes.benchmarks() == importlib.metadata.version("nestrec-bench")
    check = next(check for check in doctor._CHECKS if check.name == "nestrec-bench")
    assert check.remedy.endswith("in a clone of the repository: pip install ./benchmarks")

    def not_found(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_found)
    assert doctor._examine_one(check).status == "absent"
    monkeypatch.undo()
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **group: ())
    assert doctor._examine_one(check).status == "broken"
