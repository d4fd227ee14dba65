"""Compiles the host loops of training once, which many processes of tests would compile at the same time.

`python -m nestrec.testing.warm_up`: numba keeps what it compiles beside the modules, for all who come later.
"""

import tempfile
from pathlib import Path

from nestrec.distributed import Topology
from nestrec.testing.tiny_runs import FAMILIES, config_of, make_datasets
from nestrec.training.trainer import Trainer

SCHEDULES = ("nested", "priority", "serial")
STEPS = {"training.max_steps": 3, "training.checkpoint_every_steps": 2}


def main() -> None:
    """Runs of all families, under schedules that differ in what they compute on rows."""
    with tempfile.TemporaryDirectory(prefix="nestrec-warm-") as folder:
        make_datasets(Path(folder))
        for number, family in enumerate(FAMILIES):
            options = {**STEPS, "pipeline.schedule": SCHEDULES[number % len(SCHEDULES)]}
            Trainer(config_of(family, Path(folder), options), Path(folder) / family, Topology.single()).train()


if __name__ == "__main__":
    main()
