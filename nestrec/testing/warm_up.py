"""Compiles once what many processes of tests would compile at the same time.

`python -m nestrec.testing.warm_up FOLDER...`: numba keeps the host loops of training and serving beside the modules,
and pytest the tests of the folders with their assertions, for all who come later.
"""

import contextlib
import io
import sys
import tempfile
from pathlib import Path

import pytest

from nestrec.distributed import Topology
from nestrec.serving.api.protocol import long_lists
from nestrec.testing.tiny_runs import FAMILIES, config_of, make_datasets
from nestrec.training.trainer import Trainer

SCHEDULES = ("nested", "priority", "serial")
STEPS = {"training.max_steps": 3, "training.checkpoint_every_steps": 2}


def compile_loops() -> None:
    """Runs of all families, under schedules that differ in what they compute on rows, and what servers read with."""
    long_lists.warm_up()
    with tempfile.TemporaryDirectory(prefix="nestrec-warm-") as folder:
        make_datasets(Path(folder))
        for number, family in enumerate(FAMILIES):
            options = {**STEPS, "pipeline.schedule": SCHEDULES[number % len(SCHEDULES)]}
            Trainer(config_of(family, Path(folder), options), Path(folder) / family, Topology.single()).train()


def compile_tests(folders: list[str]) -> None:
    """Collects them, where nobody has yet. What is wrong with them is said by those who run them."""
    if not any(path for folder in folders for path in Path(folder).rglob("*-pytest-*.pyc")):
        with contextlib.redirect_stdout(io.StringIO()):
            pytest.main(["--collect-only", *folders])


if __name__ == "__main__":
    compile_loops()
    compile_tests(sys.argv[1:])
