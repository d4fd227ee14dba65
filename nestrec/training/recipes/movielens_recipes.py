"""MovieLens recipes as published with HSTU (sampled softmax, temperature 0.05, 128 negatives per token)."""

from collections.abc import Callable

from nestrec.data.batch_loader import BatchConfig
from nestrec.data.samples.retrieval_collator import HistoryConfig
from nestrec.models import FuXiConfig, HSTUConfig, SASRecConfig
from nestrec.models.backbone_registry import EncoderConfig
from nestrec.models.heads import NegativesConfig
from nestrec.pipeline.dense.dense_optimizer import OptimizerConfig
from nestrec.tasks.catalog_ranks import RetrievalEvaluationConfig
from nestrec.tasks.retrieval_task import RetrievalTaskConfig
from nestrec.training.run_config import DataConfig, RunConfig, TrainingConfig

LENGTH = 200


def _movielens(name: str, data: str, prepare: str, encoder: EncoderConfig, epochs: int = 101) -> RunConfig:
    return RunConfig(
        name=name,
        task=RetrievalTaskConfig(
            encoder=encoder,
            history=HistoryConfig(max_events=LENGTH, slide_events=1),
            negatives=NegativesConfig(num_negatives=128),
            evaluation=RetrievalEvaluationConfig(ks=(10, 50, 200), filter_seen="input"),
        ),
        data=DataConfig(folder=f"data/{data}", prepare_command=prepare),
        batch=BatchConfig(batch_size=128),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        training=TrainingConfig(epochs=epochs, early_stopping_patience=12),
    )


def _sasrec(dim: int = 50, num_layers: int = 2, num_heads: int = 1) -> SASRecConfig:
    return SASRecConfig(
        dim=dim,
        ffn_dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        max_length=LENGTH,
        norm_affine=False,
        final_norm=False,
    )


def _hstu(dim: int = 50, num_layers: int = 2, num_heads: int = 1, *, time_bias: bool = True) -> HSTUConfig:
    head_dim = dim // num_heads
    return HSTUConfig(
        dim=dim, head_dim=head_dim, num_layers=num_layers, num_heads=num_heads, max_length=LENGTH, time_bias=time_bias
    )


def _fuxi(dim: int = 50, num_layers: int = 2, num_heads: int = 1, *, time_channel: bool = True) -> FuXiConfig:
    return FuXiConfig(
        dim=dim,
        head_dim=dim // num_heads,
        ffn_dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        max_length=LENGTH,
        time_channel=time_channel,
    )


ML_1M = ("ml-1m", "nestrec prepare movielens ml-1m/ data/ml-1m (GroupLens' folder with ratings.dat)")
ML_1M_ORDERED = (
    "ml-1m-ordered",
    "nestrec prepare log ordered.tsv data/ml-1m-ordered, naming the columns (see docs/recipes.md)",
)
ML_20M = ("ml-20m", "nestrec prepare movielens ml-20m/ data/ml-20m (GroupLens' folder with ratings.csv)")
ML_100K = ("ml-100k", "nestrec prepare movielens ml-100k/ data/ml-100k (u.data, or RecBole's ml-100k.inter)")


def _recipe(name: str, data: tuple[str, str], encoder: EncoderConfig, what: str) -> Callable[[], RunConfig]:
    def make() -> RunConfig:
        return _movielens(name, *data, encoder)

    make.__doc__ = f"{what}."
    return make


MOVIELENS_RECIPES: dict[str, Callable[[], RunConfig]] = {
    "ml_1m_sasrec": _recipe("ml_1m_sasrec", ML_1M, _sasrec(), "SASRec on MovieLens 1M"),
    "ml_1m_hstu": _recipe("ml_1m_hstu", ML_1M, _hstu(), "HSTU on MovieLens 1M, as in its release"),
    "ml_1m_hstu_large": _recipe(
        "ml_1m_hstu_large", ML_1M, _hstu(num_layers=8, num_heads=2), "HSTU on MovieLens 1M, 8 layers"
    ),
    "ml_1m_fuxi": _recipe("ml_1m_fuxi", ML_1M, _fuxi(), "FuXi-alpha on MovieLens 1M"),
    "ml_1m_ordered_fuxi": _recipe(
        "ml_1m_ordered_fuxi", ML_1M_ORDERED, _fuxi(time_channel=False), "FuXi-alpha on MovieLens 1M without times"
    ),
    "ml_1m_ordered_sasrec": _recipe(
        "ml_1m_ordered_sasrec", ML_1M_ORDERED, _sasrec(), "SASRec on MovieLens 1M without times"
    ),
    "ml_1m_ordered_hstu": _recipe(
        "ml_1m_ordered_hstu", ML_1M_ORDERED, _hstu(time_bias=False), "HSTU on MovieLens 1M without times"
    ),
    "ml_1m_ordered_sasrec_large": _recipe(
        "ml_1m_ordered_sasrec_large", ML_1M_ORDERED, _sasrec(64, 4, 2), "SASRec on MovieLens 1M without times, larger"
    ),
    "ml_1m_ordered_hstu_large": _recipe(
        "ml_1m_ordered_hstu_large",
        ML_1M_ORDERED,
        _hstu(64, 4, 2, time_bias=False),
        "HSTU on MovieLens 1M without times, larger",
    ),
    "ml_20m_sasrec": _recipe("ml_20m_sasrec", ML_20M, _sasrec(256, 4, 4), "SASRec on MovieLens 20M"),
    "ml_20m_hstu": _recipe("ml_20m_hstu", ML_20M, _hstu(256, 4, 4), "HSTU on MovieLens 20M"),
    "ml_20m_hstu_large": _recipe("ml_20m_hstu_large", ML_20M, _hstu(256, 16, 8), "HSTU on MovieLens 20M, 16 layers"),
    "ml_100k_sasrec": _recipe("ml_100k_sasrec", ML_100K, _sasrec(), "SASRec on MovieLens 100K"),
    "ml_100k_hstu": _recipe("ml_100k_hstu", ML_100K, _hstu(), "HSTU on MovieLens 100K"),
}
