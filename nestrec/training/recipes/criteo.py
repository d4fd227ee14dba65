"""Criteo display advertising: click prediction with a small DLRM over a dynamic table of hashed categories."""

from nestrec.data.batches import BatchConfig
from nestrec.pipeline.dense.options import OptimizerConfig
from nestrec.tasks.rows import RowsTaskConfig
from nestrec.training.config import DataConfig, RunConfig, TrainingConfig


def criteo_dlrm() -> RunConfig:
    """A DLRM on rows in file order; the last tenth tests."""
    return RunConfig(
        name="criteo_dlrm",
        task=RowsTaskConfig(),
        data=DataConfig(folder="data/criteo", prepare="nestrec prepare criteo train.txt data/criteo"),
        batch=BatchConfig(batch_samples=256),
        optimizer=OptimizerConfig(learning_rate=1e-3, table_learning_rate=0.01),
        training=TrainingConfig(epochs=5, patience=2),
    )


RECIPES = {"criteo_dlrm": criteo_dlrm}
