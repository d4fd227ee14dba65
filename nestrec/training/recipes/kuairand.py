"""KuaiRand: multi-task ranking of short videos on interleaved item and action tokens."""

from nestrec.data.batches import BatchConfig
from nestrec.data.samples.ranking import RankingInputConfig
from nestrec.data.samples.split import SplitConfig
from nestrec.models import HSTUConfig
from nestrec.pipeline.dense.options import OptimizerConfig
from nestrec.tasks.ranking import RankingTaskConfig
from nestrec.training.config import DataConfig, RunConfig, TrainingConfig

MAX_EVENTS = 64
VALID_FROM = "2022-04-29T00:00+08:00"
LAST_DAY = "2022-04-30T00:00+08:00"
"""the last day of the public sample, as its platform counts days"""


USER_FEATURES = (
    "active_degree",
    "is_video_author",
    "follow_user_num_range",
    "fans_user_num_range",
    "register_days_range",
    "onehot_feat1",
    "onehot_feat4",
)


def kuairand_ranking() -> RunConfig:
    """Click, long view and like on the last day, from what the user did before."""
    return RunConfig(
        name="kuairand_ranking",
        task=RankingTaskConfig(
            encoder=HSTUConfig(dim=32, head_dim=16, num_heads=2, num_layers=2, dropout=0.3, max_length=2 * MAX_EVENTS),
            inputs=RankingInputConfig(
                labels=("click", "long_view", "like"),
                event_features=("tab",),
                user_features=USER_FEATURES,
                item_features=("author_id", "video_type", "upload_type", "music_type"),
                max_events=MAX_EVENTS,
            ),
            split=SplitConfig(valid_from=VALID_FROM, test_from=LAST_DAY),
            baseline_category="tab",
        ),
        data=DataConfig(
            folder="data/kuairand-pure",
            prepare=f"nestrec prepare kuairand KuaiRand-Pure/data data/kuairand-pure --fit_until {VALID_FROM}",
        ),
        batch=BatchConfig(batch_samples=256),
        optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=1e-2),
        training=TrainingConfig(epochs=20, patience=3),
    )


RECIPES = {"kuairand_ranking": kuairand_ranking}
