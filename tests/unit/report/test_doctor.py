import os
import re
import shutil
import tomllib
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from nestrec.report import doctor
from nestrec.report import doctor as probes
from nestrec.report.doctor import Finding, doctor_table, examine

ROOT = Path(__file__).resolve().parents[3]


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_what_the_tests_themselves_need_is_found_to_work() -> None:
    found = by_name(examine())
    for name in ("Python", "PyTorch", "CPU", "numba", "pyarrow", "Gloo", "TensorBoard", "Serving"):
        assert found[name].status == "ok", found[name]
        assert found[name].remedy == ""
    assert {"CUDA", "Triton", "NCCL", "Symmetric memory", "Limited links", "Disk", "TorchRec", "Ray"} <= found.keys()
    assert all(finding.remedy for finding in found.values() if finding.status != "ok")


def test_serving_lacks_what_any_of_its_packages_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "SERVING_PACKAGES", ("json", "no_such_package"))
    with pytest.raises(probes.NotInstalledError, match="no_such_package is not installed"):
        probes.serving()


def test_a_part_that_raises_is_broken_and_one_that_is_not_there_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise ZeroDivisionError("first line\nsecond line")

    def absent() -> str:
        raise probes.NotInstalledError("not installed")

    checks = [doctor._Check("a", broken, "mend it"), doctor._Check("b", absent, "get it", True)]
    monkeypatch.setattr(doctor, "_CHECKS", checks)
    assert examine() == [
        Finding(name="a", status="broken", detail="ZeroDivisionError: first line", remedy="mend it"),
        Finding(name="b", status="absent", detail="not installed", remedy="get it"),
    ]


def test_an_installed_package_that_cannot_be_imported_is_broken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('wrong build')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="wrong build"):
        probes.ray()


def test_hints_name_extras_that_there_are() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    hints = {check.name: check.remedy for check in doctor._CHECKS}
    named = {name: re.findall(r"pip install '([\w.-]+)\[(\w+)\]'", hint) for name, hint in hints.items()}
    assert {name: found for name, found in named.items() if found} == {
        "Serving": [("nestrec", "serve")],
        "Ray": [("nestrec", "ray")],
        **{f"Extra {name}": [("nestrec", name)] for name in probes.EXTRAS},
    }
    assert extras.keys() - {"docs", "dev"} == {"serve", "ray", *probes.EXTRAS}
    for name, distributions in probes.EXTRAS.items():
        assert sorted(re.split(r"[<>=]", needed)[0] for needed in extras[name]) == sorted(distributions)


def test_doctor_finds_extras_and_names_missing_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probes.extra("client").startswith("httpx ")
    monkeypatch.setitem(probes.EXTRAS, "client", ("httpx", "no-such-package"))
    with pytest.raises(probes.NotInstalledError, match="no-such-package is not installed"):
        probes.extra("client")


def test_limited_links_need_root_and_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(probes.NotInstalledError, match="not root"):
        probes.limited_links()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else name)
    with pytest.raises(probes.NotInstalledError, match="no command tc"):
        probes.limited_links()


def test_the_table_shows_remedies_on_a_narrow_terminal() -> None:
    findings = [Finding(name="Ray", status="absent", detail="not installed", remedy="pip install 'nestrec[ray]'")]
    file = StringIO()
    Console(file=file, width=60).print(doctor_table(findings))
    assert "absent" in file.getvalue()
    assert "nestrec[ray]" in file.getvalue()
