"""Trains a recipe on a Ray cluster: Ray Train starts the ranks instead of torchrun, one worker per GPU.

    ray job submit -- python ray_train.py demo --output /shared/runs/demo --workers 8:32 \\
        --training.checkpoint_every_steps 500 --training.checkpoint_async true

Output and dataset must be on a file system that all machines share. If workers are lost, Ray restarts as many as the
cluster has capacity for, at least the first number of `--workers`, and the run resumes from its last checkpoint; it
grows again when capacity returns. `--device cpu` uses one core per worker. Other options are those of `nestrec train`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nestrec.api import resolve_config
from nestrec.base.config_overrides import parse_overrides

MAX_FAILURES = 100


def read(words: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """Parse the options of this script and of the run; invalid options are reported before anything starts."""
    parser = argparse.ArgumentParser(description="train a recipe on a Ray cluster")
    parser.add_argument("recipe", help="name of a recipe, or a config.json")
    parser.add_argument("--output", required=True, type=Path, help="the run folder")
    parser.add_argument("--workers", default="1", help="number of workers, or MIN:MAX for an elastic run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cpus", type=int, default=None, help="cores per worker; default 12 with a GPU, 1 without")
    args, others = parser.parse_known_args(words)
    overrides = {**parse_overrides(others), "training.device": args.device}
    resolve_config(args.recipe, overrides)
    return args, overrides


def work(run: dict[str, Any]) -> None:
    """Train on one worker; Ray has set RANK and the other variables of torchrun, and connected the workers by Gloo."""
    import nestrec

    nestrec.train(run["recipe"], run["overrides"], output=run["output"])


def trainer_of(args: argparse.Namespace, overrides: dict[str, str]) -> Any:
    """Return Ray's trainer for the run."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    fewest, _, most = args.workers.partition(":")
    has_gpu = args.device == "cuda"
    output = args.output.absolute()
    cores = args.cpus or (12 if has_gpu else 1)
    return TorchTrainer(
        work,
        train_loop_config={"recipe": args.recipe, "overrides": overrides, "output": str(output)},
        torch_config=TorchConfig(backend="gloo", timeout_s=300),
        scaling_config=ScalingConfig(
            num_workers=(int(fewest), int(most)) if most else int(fewest),
            use_gpu=has_gpu,
            resources_per_worker={"CPU": cores, "GPU": 1} if has_gpu else {"CPU": cores},
        ),
        run_config=RunConfig(
            name=f"{output.name}-ray",
            storage_path=str(output.parent),
            failure_config=FailureConfig(max_failures=MAX_FAILURES),
        ),
    )


if __name__ == "__main__":
    trainer_of(*read(sys.argv[1:])).fit()
