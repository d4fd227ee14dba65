"""Recipes for the demo data, Amazon Beauty, Criteo, KuaiRand, and ranking on your own log.

- demo: synthetic logs without download; trains in minutes on two CPU cores.
- Amazon Beauty, 5-core: leave-one-out split, full ranking, cross-entropy over the full catalog.
- Criteo display advertising: CTR prediction with a small DLRM and a dynamic table of hashed categories.
- KuaiRand: multi-task ranking of short videos with interleaved item and action tokens.
- ranking: multi-task ranking on your own log, with any actions as labels and any categories as features.
"""

from nestrec.data.batch_loader import BatchConfig
from nestrec.data.samples.ranking_collator import RankingHistoryConfig, RankingInputConfig
from nestrec.data.samples.retrieval_collator import HistoryConfig
from nestrec.data.samples.split import SplitConfig
from nestrec.models import FuXiConfig, HSTUConfig, SASRecConfig
from nestrec.models.backbone_registry import EncoderConfig
from nestrec.models.heads import NegativesConfig, SimilarityConfig
from nestrec.pipeline.dense.dense_optimizer import OptimizerConfig
from nestrec.tasks.catalog_ranks import RetrievalEvaluationConfig
from nestrec.tasks.ctr_task import CTRTaskConfig
from nestrec.tasks.ranking_task import RankingEvaluationConfig, RankingTaskConfig
from nestrec.tasks.retrieval_task import RetrievalTaskConfig
from nestrec.training.run_config import DataConfig, RunConfig, TrainingConfig

AMAZON_LENGTH = 50


def _beauty(name: str, encoder: EncoderConfig, similarity: SimilarityConfig) -> RunConfig:
    return RunConfig(
        name=name,
        task=RetrievalTaskConfig(
            encoder=encoder,
            similarity=similarity,
            history=HistoryConfig(max_events=AMAZON_LENGTH, slide_events=1),
            loss="full",
            evaluation=RetrievalEvaluationConfig(ks=(10, 50), filter_seen="history"),
        ),
        data=DataConfig(
            folder="data/beauty",
            prepare_command="nestrec prepare user_lines Beauty.txt data/beauty (S3Rec's file of Amazon Beauty)",
        ),
        batch=BatchConfig(batch_size=256),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        training=TrainingConfig(epochs=60, early_stopping_patience=8),
    )


# The best settings of one grid search for both models on the validation split; see docs/results/quality.md.
DOT_PRODUCT = SimilarityConfig(normalize=False, temperature=1.0)
COSINE = SimilarityConfig(normalize=True, temperature=0.05)


def beauty_sasrec() -> RunConfig:
    """SASRec with cross-entropy over the full catalog and dot products, as in its paper."""
    return _beauty("beauty_sasrec", _sasrec(dim=256, dropout=0.6), DOT_PRODUCT)


def beauty_hstu() -> RunConfig:
    """HSTU with cross-entropy over the full catalog and dot products."""
    return _beauty("beauty_hstu", _hstu(dim=128, dropout=0.6), DOT_PRODUCT)


def beauty_sasrec_cosine() -> RunConfig:
    """SASRec with cross-entropy over the full catalog and cosine similarity."""
    return _beauty("beauty_sasrec_cosine", _sasrec(dim=128, dropout=0.7), COSINE)


def beauty_hstu_cosine() -> RunConfig:
    """HSTU with cross-entropy over the full catalog and cosine similarity."""
    return _beauty("beauty_hstu_cosine", _hstu(dim=128, dropout=0.6), COSINE)


def _sasrec(*, dim: int, dropout: float) -> SASRecConfig:
    return SASRecConfig(dim=dim, ffn_dim=dim, num_layers=2, num_heads=2, dropout=dropout, max_length=AMAZON_LENGTH)


def _hstu(*, dim: int, dropout: float) -> HSTUConfig:
    return HSTUConfig(dim=dim, head_dim=dim // 2, num_heads=2, num_layers=2, dropout=dropout, max_length=AMAZON_LENGTH)


AMAZON_RECIPES = {
    "beauty_sasrec": beauty_sasrec,
    "beauty_hstu": beauty_hstu,
    "beauty_sasrec_cosine": beauty_sasrec_cosine,
    "beauty_hstu_cosine": beauty_hstu_cosine,
}


def criteo_dlrm() -> RunConfig:
    """DLRM on Criteo rows in file order; the last tenth is the test split."""
    return RunConfig(
        name="criteo_dlrm",
        task=CTRTaskConfig(),
        data=DataConfig(folder="data/criteo", prepare_command="nestrec prepare criteo train.txt data/criteo"),
        batch=BatchConfig(batch_size=256),
        optimizer=OptimizerConfig(learning_rate=1e-3, table_learning_rate=0.01),
        training=TrainingConfig(epochs=5, early_stopping_patience=2),
    )


CRITEO_RECIPES = {"criteo_dlrm": criteo_dlrm}


DEMO_LENGTH = 64


def _demo(name: str, encoder: EncoderConfig) -> RunConfig:
    return RunConfig(
        name=name,
        task=RetrievalTaskConfig(
            encoder=encoder,
            history=HistoryConfig(max_events=DEMO_LENGTH, slide_events=1),
            similarity=SimilarityConfig(temperature=0.1),
            negatives=NegativesConfig(num_negatives=128),
            evaluation=RetrievalEvaluationConfig(ks=(10, 50)),
        ),
        data=DataConfig(folder="data/synthetic-interests", synthetic="interests"),
        batch=BatchConfig(batch_size=64),
        optimizer=OptimizerConfig(learning_rate=3e-3),
        training=TrainingConfig(epochs=14),
    )


def demo() -> RunConfig:
    """HSTU with position and time bias on synthetic logs."""
    return _demo(
        "demo", HSTUConfig(dim=48, head_dim=24, num_heads=2, num_layers=2, max_length=DEMO_LENGTH, time_bias=True)
    )


def demo_fuxi() -> RunConfig:
    """FuXi-alpha on synthetic logs."""
    return _demo(
        "demo_fuxi", FuXiConfig(dim=48, head_dim=24, num_heads=2, ffn_dim=48, num_layers=2, max_length=DEMO_LENGTH)
    )


def demo_sasrec() -> RunConfig:
    """SASRec on synthetic logs."""
    return _demo("demo_sasrec", SASRecConfig(dim=48, ffn_dim=48, num_layers=2, max_length=DEMO_LENGTH))


DEMO_RECIPES = {"demo": demo, "demo_fuxi": demo_fuxi, "demo_sasrec": demo_sasrec}


MAX_EVENTS = 64
VALID_FROM = "2022-04-29T00:00+08:00"
LAST_DAY = "2022-04-30T00:00+08:00"
"""Start of the last day of the public sample, in the time zone of the platform."""


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
    """Ranking: predicts click, long view and like on the last day from the user's history."""
    return RunConfig(
        name="kuairand_ranking",
        task=RankingTaskConfig(
            encoder=HSTUConfig(dim=32, head_dim=16, num_heads=2, num_layers=2, dropout=0.3, max_length=2 * MAX_EVENTS),
            history=RankingHistoryConfig(max_events=MAX_EVENTS),
            inputs=RankingInputConfig(
                labels=("click", "long_view", "like"),
                event_features=("tab",),
                user_features=USER_FEATURES,
                item_features=("author_id", "video_type", "upload_type", "music_type"),
            ),
            split=SplitConfig(valid_from=VALID_FROM, test_from=LAST_DAY),
            evaluation=RankingEvaluationConfig(baseline_category="tab"),
        ),
        data=DataConfig(
            folder="data/kuairand-pure",
            prepare_command=f"nestrec prepare kuairand KuaiRand-Pure/data data/kuairand-pure --fit_until {VALID_FROM}",
        ),
        batch=BatchConfig(batch_size=256),
        optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=1e-2),
        training=TrainingConfig(epochs=20, early_stopping_patience=3),
    )


KUAIRAND_RECIPES = {"kuairand_ranking": kuairand_ranking}


PREPARE = (
    "nestrec prepare log events.csv data/mine --log.time ts --log.time_unit iso --log.actions click=clicked, "
    "then --data.folder data/mine --task.inputs.labels click"
)


def ranking() -> RunConfig:
    """Ranking on your own log: predicts a user's actions from the history."""
    return RunConfig(
        name="ranking",
        task=RankingTaskConfig(
            encoder=HSTUConfig(dim=32, head_dim=16, num_heads=2, num_layers=2, dropout=0.2, max_length=2 * MAX_EVENTS),
            history=RankingHistoryConfig(max_events=MAX_EVENTS),
            inputs=RankingInputConfig(labels=("click",)),
        ),
        data=DataConfig(prepare_command=PREPARE),
        batch=BatchConfig(batch_size=128),
        optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=1e-2),
        training=TrainingConfig(epochs=20, early_stopping_patience=3),
    )


RANKING_RECIPES = {"ranking": ranking}
