"""Small runs that tests of serving train."""

from dataclasses import dataclass, replace
from pathlib import Path

from nestrec.data.batch_loader import BatchConfig
from nestrec.data.samples.ranking_collator import RankingInputConfig
from nestrec.data.samples.split import SplitConfig
from nestrec.distributed import Topology
from nestrec.exporters.servable_writer import export_run
from nestrec.models import HSTUConfig
from nestrec.tasks.ranking_task import RankingTaskConfig
from nestrec.training.run_config import DataConfig, RunConfig, TrainingConfig
from nestrec.training.trainer import Trainer

LENGTH = 32


def ranking_recipe(folder: Path) -> RunConfig:
    encoder = HSTUConfig(dim=16, head_dim=8, num_heads=2, num_layers=2, max_length=2 * LENGTH, time_bias=True)
    inputs = RankingInputConfig(labels=("click", "long_view"), item_features=("topic",), max_events=LENGTH)
    task = RankingTaskConfig(
        encoder=encoder,
        inputs=inputs,
        split=SplitConfig(valid_from="2022-01-16T02:26:40", test_from="2022-01-17T06:13:20"),
        baselines=("logistic",),
    )
    return RunConfig(
        name="small_ranking", task=task, data=DataConfig(folder=str(folder)), batch=BatchConfig(batch_samples=64)
    )


@dataclass(frozen=True)
class Exported:
    trainer: Trainer
    run: Path
    folder: Path


def train_and_export(cfg: RunConfig, root: Path) -> Exported:
    cfg = replace(cfg, training=TrainingConfig(epochs=1, max_steps=12, evaluate_every_epochs=0))
    trainer = Trainer(cfg, root / "run", Topology.from_environment("cpu"))
    trainer.train()
    export_run(root / "run", root / "model")
    return Exported(trainer, root / "run", root / "model")
