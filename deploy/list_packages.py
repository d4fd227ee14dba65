"""Prints the requirements of a pyproject.toml, one per line: python list_packages.py PYPROJECT EXTRA,EXTRA

The container image installs them in a separate layer, which is reused if only the code changes.
"""

import sys
import tomllib
from pathlib import Path


def packages(pyproject: Path, extras: str) -> list[str]:
    project = tomllib.loads(pyproject.read_text())["project"]
    chosen = [project["optional-dependencies"][extra] for extra in extras.split(",") if extra]
    return sorted({*project["dependencies"], *(package for extra in chosen for package in extra)})


if __name__ == "__main__":
    print("\n".join(packages(Path(sys.argv[1]), sys.argv[2])))
