"""A run on the machines of a Ray cluster: Ray Train starts the ranks in the place of torchrun, one worker for each GPU.

    ray job submit -- python ray_train.py demo --output /shared/runs/demo --workers 8:32 \\
        --training.checkpoint_every_steps 500 --training.checkpoint_async true

Output and dataset lie on a file system that all machines share. When workers are lost, Ray starts as many as there is
room for, at least the first number, and the run goes on from its last checkpoint on them; with more when there is room
again. `--device cpu` takes a core for each worker. Further options are those of `nestrec train`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nestrec.api import configured
from nestrec.base.config_overrides import parse_overrides

MOST_FAILURES = 100


def read(words: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """This file's own options, and those of the run, which are checked before anything is started."""
    parser = argparse.ArgumentParser(description="train a recipe on a Ray cluster")
    parser.add_argument("recipe", help="name of a recipe, or a config.json")
    parser.add_argument("--output", required=True, type=Path, help="the run folder")
    parser.add_argument("--workers", default="1", help="how many, or fewest:most")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cpus", type=int, default=None, help="cores of a worker; 12 beside a GPU, 1 without")
    args, others = parser.parse_known_args(words)
    overrides = {**parse_overrides(others), "training.device": args.device}
    configured(args.recipe, overrides)
    return args, overrides


def work(run: dict[str, Any]) -> None:
    """What every worker does. Ray has set RANK and the like as torchrun does, and joined the workers by Gloo."""
    import nestrec

    nestrec.train(run["recipe"], run["overrides"], output=run["output"])


def trainer_of(args: argparse.Namespace, overrides: dict[str, str]) -> Any:
    """Ray's trainer of that run."""
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
            failure_config=FailureConfig(max_failures=MOST_FAILURES),
        ),
    )


if __name__ == "__main__":
    trainer_of(*read(sys.argv[1:])).fit()
