"""Small training runs for the serving tests."""

from dataclasses import dataclass, replace
from pathlib import Path

from nestrec.data.batch_loader import BatchConfig
from nestrec.data.samples.ranking_collator import RankingHistoryConfig, RankingInputConfig
from nestrec.data.samples.split import SplitConfig
from nestrec.distributed import Topology
from nestrec.exporters.servable_writer import export_run
from nestrec.models import HSTUConfig
from nestrec.tasks.ranking_task import RankingEvaluationConfig, RankingTaskConfig
from nestrec.training.run_config import DataConfig, RunConfig, TrainingConfig
from nestrec.training.trainer import Trainer

LENGTH = 32
"""Maximum number of events in a history."""


def ranking_recipe(folder: Path) -> RunConfig:
    encoder = HSTUConfig(dim=16, head_dim=8, num_heads=2, num_layers=2, max_length=2 * LENGTH, time_bias=True)
    inputs = RankingInputConfig(labels=("click", "long_view"), item_features=("topic",))
    task = RankingTaskConfig(
        encoder=encoder,
        history=RankingHistoryConfig(max_events=LENGTH),
        inputs=inputs,
        split=SplitConfig(valid_from="2022-01-16T02:26:40", test_from="2022-01-17T06:13:20"),
        evaluation=RankingEvaluationConfig(baselines=("logistic",)),
    )
    return RunConfig(
        name="small_ranking", task=task, data=DataConfig(folder=str(folder)), batch=BatchConfig(batch_size=64)
    )


@dataclass(frozen=True)
class ExportedRun:
    """A finished run and its export."""

    trainer: Trainer
    run: Path
    folder: Path


def train_and_export(cfg: RunConfig, root: Path) -> ExportedRun:
    cfg = replace(cfg, training=TrainingConfig(epochs=1, max_steps=12, eval_every_epochs=0))
    trainer = Trainer(cfg, root / "run", Topology.from_environment("cpu"))
    trainer.train()
    export_run(root / "run", root / "model")
    return ExportedRun(trainer, root / "run", root / "model")
