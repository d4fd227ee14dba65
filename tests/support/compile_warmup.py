"""Compiles host loops and tests once, so that parallel test processes do not compile them at the same time.

`python -m support.compile_warmup FOLDER...` fills two caches: numba's cache of the host loops of training and serving,
and pytest's cache of the rewritten tests of the folders.
"""

import contextlib
import io
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from nestrec.balance import POLICIES, partition
from nestrec.distributed import Topology
from nestrec.serving.inputs import json_long_lists
from nestrec.training.trainer import Trainer
from support.tiny_runs import config_of, make_datasets

STEPS = {"training.max_steps": 3, "training.checkpoint_every_steps": 2}
RUNS: tuple[tuple[str, dict[str, object]], ...] = (
    ("hstu", {"pipeline.schedule": "nested", "pipeline.window_cache": True}),
    ("sasrec", {"pipeline.schedule": "priority", "tables.*.dtype": "bfloat16"}),
    (
        "ranking",
        {"pipeline.schedule": "serial", "training.weight_dtype": "float64", "tables.item_topic.optimizer": "sgd"},
    ),
    ("rows", {"pipeline.schedule": "nested", "training.weight_dtype": "float64"}),
    ("rows", {"pipeline.schedule": "nested", "task.table_store.kind": "disk", "task.table_store.cache_rows": 16}),
)
"""Runs of all families, with schedules that compute different things on rows, and rows of several types and stores."""


def compile_loops() -> None:
    """Compile the host loops by small runs, by balancing samples with each policy, and by the servers' JSON reader."""
    json_long_lists.warm_up()
    for policy in POLICIES:
        partition(policy, np.arange(1, 8, dtype=np.float64), 2, lengths=np.arange(1, 8))
    with tempfile.TemporaryDirectory(prefix="nestrec-warm-") as folder:
        make_datasets(Path(folder))
        rows = {"task.table_store.folder": folder}
        for number, (family, options) in enumerate(RUNS):
            cfg = config_of(family, Path(folder), {**STEPS, **options, **(rows if family == "rows" else {})})
            trainer = Trainer(cfg, Path(folder) / str(number), Topology.single())
            for name in trainer.session.engine.tables:
                trainer.session.engine.digest(name)
            trainer.train()


def compile_tests(folders: list[str]) -> None:
    """Collect the tests if they have not been collected before; errors are reported when the tests run."""
    if not any(path for folder in folders for path in Path(folder).rglob("*-pytest-*.pyc")):
        with contextlib.redirect_stdout(io.StringIO()):
            pytest.main(["--collect-only", *folders])


if __name__ == "__main__":
    compile_loops()
    compile_tests(sys.argv[1:])
