"""The launch file for Ray Train: two workers of a Ray cluster produce the same run as two ranks."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

import nestrec
from nestrec.distributed import Topology
from nestrec.training.state import run_digest
from nestrec.training.trainer import Trainer
from support.rank_pool import RankPool
from support.tiny_runs import config_of, make_datasets, overrides_of

FILE = Path(__file__).resolve().parents[2] / "deploy" / "training" / "ray_train.py"
EPOCHS = {"training.epochs": 2}


def launch_file() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ray_train", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(topology: Topology, data: str, run: str) -> None:
    Trainer(config_of("hstu", Path(data), EPOCHS), Path(run), topology).train()


def test_ray_train_launch_file_sets_scaling_and_retries() -> None:
    file = launch_file()
    args, overrides = file.read(["demo", "--output", "runs/demo", "--workers", "8:32", "--training.epochs", "2"])
    trainer = file.trainer_of(args, overrides)
    assert isinstance(trainer, TorchTrainer)
    assert trainer.scaling_config == ScalingConfig(
        num_workers=(8, 32), use_gpu=True, resources_per_worker={"CPU": 12, "GPU": 1}
    )
    assert trainer.run_config.failure_config.max_failures == file.MAX_FAILURES


@pytest.mark.filterwarnings("ignore")  # warnings of Ray itself
@pytest.mark.timeout(900)
def test_ray_train_two_workers_equal_two_ranks(tmp_path: Path) -> None:
    make_datasets(tmp_path)
    options = overrides_of("hstu", tmp_path, EPOCHS)
    arguments = [f"--{name}={value}" for name, value in options.items() if name != "training.device"]
    file = launch_file()
    run = tmp_path / "ray_run"
    args, overrides = file.read(["demo", "--output", str(run), "--workers", "2", "--device", "cpu", *arguments])
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": _root()}})
    try:
        result = file.trainer_of(args, overrides).fit()
    finally:
        ray.shutdown()
    assert result.error is None
    pool = RankPool(2)
    pool.run(train, str(tmp_path), str(tmp_path / "rank_run"))
    pool.close()
    assert run_digest(run) == run_digest(tmp_path / "rank_run")
    assert list((run / "eval").iterdir()), "the run is evaluated, too"


def _root() -> str:
    return str(Path(nestrec.__file__).resolve().parents[1])
