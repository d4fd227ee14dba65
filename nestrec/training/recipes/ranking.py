"""Multi-task ranking on a log of one's own: any actions as labels, any categories of items, users and events."""

from nestrec.data.batches import BatchConfig
from nestrec.data.samples.ranking import RankingInputConfig
from nestrec.models import HSTUConfig
from nestrec.pipeline.dense.options import OptimizerConfig
from nestrec.tasks.ranking import RankingTaskConfig
from nestrec.training.config import DataConfig, RunConfig, TrainingConfig

MAX_EVENTS = 64
PREPARE = (
    "nestrec prepare log events.csv data/mine --log.time ts --log.time_unit iso --log.actions click=clicked, "
    "then --data.folder data/mine --task.inputs.labels click"
)


def ranking() -> RunConfig:
    """Ranking on your own log: what a user will do with an item, from what they did before."""
    return RunConfig(
        name="ranking",
        task=RankingTaskConfig(
            encoder=HSTUConfig(dim=32, head_dim=16, num_heads=2, num_layers=2, dropout=0.2, max_length=2 * MAX_EVENTS),
            inputs=RankingInputConfig(labels=("click",), max_events=MAX_EVENTS),
        ),
        data=DataConfig(prepare=PREPARE),
        batch=BatchConfig(batch_samples=128),
        optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=1e-2),
        training=TrainingConfig(epochs=20, patience=3),
    )


RECIPES = {"ranking": ranking}
