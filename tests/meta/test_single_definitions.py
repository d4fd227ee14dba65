"""Constants and decisions that the package must define only once."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "nestrec"
HOMES = {
    r"0x9E3779B9|0xBF58476D|0x94D049BB|0x7FEB352D|0x846CA68B": "base/random.py",
    r"\"cuda\" if torch\.cuda\.is_available\(\) else \"cpu\"": "base/cuda.py",
    r"Literal\[\"auto\", \"cpu\", \"cuda\"\]": "base/cuda.py",
}
"""What is written down to the one file that may write it."""


@pytest.mark.parametrize(("pattern", "home"), HOMES.items(), ids=["mixing constants", "auto device", "device choices"])
def test_shared_values_are_defined_once(pattern, home):
    found = {p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py") if re.search(pattern, p.read_text())}
    assert found == {home}
