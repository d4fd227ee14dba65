"""The table of what can be added names files, groups and examples that there are."""

import importlib
import re
import tomllib
from pathlib import Path

from nestrec.base.plugins import PluginRegistry

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "examples" / "plugin"


def test_contributing_lists_every_registry_with_example() -> None:
    rows = re.findall(
        r"^\| [^|]+ \| [^|]+ \| `([^`]+)` \| `([^`]+)` \| `(nestrec\.\w+)` \|$",
        (ROOT / "CONTRIBUTING.md").read_text(),
        re.MULTILINE,
    )
    entries = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]["entry-points"]
    assert {group for _, _, group in rows} == set(entries)
    for listed, example, group in rows:
        module = importlib.import_module(listed.removesuffix(".py").replace("/", "."))
        assert group in {value.group for value in vars(module).values() if isinstance(value, PluginRegistry)}
        assert (PLUGIN / example).is_file()
        named = example.removesuffix(".py").replace("/", ".")
        assert [value.partition(":")[0] for value in entries[group].values()] == [named]
