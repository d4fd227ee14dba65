"""Files of earlier versions still load, with the same tables, weights and scores.

The stored files and their expected values are under tests/formats/artifacts, one folder for each commit that wrote
them; see tests/formats/write_artifacts.py.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from stored_formats import ARTIFACTS, EXPECTED_FILE, OBSERVERS, unpack

TOLERANCE = 1e-5
CONTINUED_TOLERANCE = 1e-3
"""Tolerance of values after further training steps, because optimizers amplify rounding differences."""


class Artifacts:
    """The artifacts of one commit, unpacked into the current folder."""

    def __init__(self, expected: Mapping[str, Any]):
        self._expected = expected

    def check(self, kind: str) -> None:
        """Load the artifacts of a kind, and compare the result with that of the code that wrote them."""
        found = json.loads(json.dumps(OBSERVERS[kind]()))
        assert_same(found, self._expected[kind], kind)


@pytest.fixture(params=sorted(path.name for path in ARTIFACTS.iterdir()))
def artifacts(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Artifacts:
    folder = ARTIFACTS / request.param
    unpack(folder, tmp_path)
    monkeypatch.chdir(tmp_path)
    return Artifacts(json.loads((folder / EXPECTED_FILE).read_text()))


def assert_same(found: Any, expected: Any, where: str) -> None:
    """Check that floats agree within rounding and other values are equal; `found` may have more names."""
    if isinstance(expected, dict):
        assert expected.keys() <= found.keys(), f"{where}: {sorted(expected.keys() - found.keys())} missing"
        for name, value in expected.items():
            assert_same(found[name], value, f"{where}: {name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            assert_same(found[index], value, f"{where}: {index}")
    elif isinstance(expected, float):
        tolerance = CONTINUED_TOLERANCE if ": continued" in where else TOLERANCE
        assert math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance), (where, found, expected)
    else:
        assert found == expected, where


def test_old_dataset_loads(artifacts: Artifacts) -> None:
    artifacts.check("dataset")


@pytest.mark.parametrize("task", ["retrieval", "ranking", "rows"])
def test_old_run_loads(artifacts: Artifacts, task: str) -> None:
    """Loads the full, incremental and best checkpoints, and trains further steps from the last one."""
    artifacts.check(f"{task}_run")


def test_old_checkpoint_mirror_loads(artifacts: Artifacts) -> None:
    artifacts.check("mirror")


def test_old_followed_run_loads(artifacts: Artifacts) -> None:
    artifacts.check("followed_run")


@pytest.mark.parametrize("form", ["retrieval", "int8", "faiss", "ranking", "ctr"])
def test_old_servable_loads(artifacts: Artifacts, form: str) -> None:
    if form == "faiss":
        pytest.importorskip("faiss")
    artifacts.check(f"{form}_servable")


def test_old_published_versions_load(artifacts: Artifacts) -> None:
    """Loads each version, and publishes the next versions as deltas of the last one."""
    artifacts.check("published")


def test_old_servables_pass_server_checks(artifacts: Artifacts) -> None:
    artifacts.check("service")


def test_old_pipeline_checkpoint_loads(artifacts: Artifacts) -> None:
    artifacts.check("own_model")


@pytest.mark.parametrize("kind", ["history", "report", "result", "config"])
def test_old_plain_file_loads(artifacts: Artifacts, kind: str) -> None:
    artifacts.check(kind)


def test_old_batch_job_loads(artifacts: Artifacts) -> None:
    artifacts.check("job")
