"""Amazon Beauty, 5-core: leave-one-out, full ranking, whole-catalogue cross-entropy."""

from nestrec.data.batches import BatchConfig
from nestrec.data.samples.retrieval import HistoryConfig
from nestrec.models import HSTUConfig, SASRecConfig
from nestrec.models.backbones import EncoderConfig
from nestrec.models.retrieval import SimilarityConfig
from nestrec.pipeline.dense.options import OptimizerConfig
from nestrec.tasks.catalogue_ranks import RetrievalEvaluationConfig
from nestrec.tasks.retrieval import RetrievalTaskConfig
from nestrec.training.config import DataConfig, RunConfig, TrainingConfig

LENGTH = 50


def _beauty(name: str, encoder: EncoderConfig, similarity: SimilarityConfig) -> RunConfig:
    return RunConfig(
        name=name,
        task=RetrievalTaskConfig(
            encoder=encoder,
            similarity=similarity,
            history=HistoryConfig(max_length=LENGTH, slide_events=1),
            loss="full",
            evaluation=RetrievalEvaluationConfig(ks=(10, 50), filter_seen="history"),
        ),
        data=DataConfig(
            folder="data/beauty",
            prepare="nestrec prepare user_lines Beauty.txt data/beauty (S3Rec's file of Amazon Beauty)",
        ),
        batch=BatchConfig(batch_samples=256),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        training=TrainingConfig(epochs=60, patience=8),
    )


# Settings are the best on the validation part of one grid for both models; docs/results/quality.md has all of it.
DOT_PRODUCT = SimilarityConfig(normalise=False, temperature=1.0)
COSINE = SimilarityConfig(normalise=True, temperature=0.05)


def beauty_sasrec() -> RunConfig:
    """SASRec with cross-entropy over the whole catalogue, by dot product as in its paper."""
    return _beauty("beauty_sasrec", _sasrec(dim=256, dropout=0.6), DOT_PRODUCT)


def beauty_hstu() -> RunConfig:
    """HSTU with cross-entropy over the whole catalogue, by dot product."""
    return _beauty("beauty_hstu", _hstu(dim=128, dropout=0.6), DOT_PRODUCT)


def beauty_sasrec_cosine() -> RunConfig:
    """SASRec with cross-entropy over the whole catalogue, by cosine over a temperature."""
    return _beauty("beauty_sasrec_cosine", _sasrec(dim=128, dropout=0.7), COSINE)


def beauty_hstu_cosine() -> RunConfig:
    """HSTU with cross-entropy over the whole catalogue, by cosine over a temperature."""
    return _beauty("beauty_hstu_cosine", _hstu(dim=128, dropout=0.6), COSINE)


def _sasrec(*, dim: int, dropout: float) -> SASRecConfig:
    return SASRecConfig(dim=dim, ffn_dim=dim, num_layers=2, num_heads=2, dropout=dropout, max_length=LENGTH)


def _hstu(*, dim: int, dropout: float) -> HSTUConfig:
    return HSTUConfig(dim=dim, head_dim=dim // 2, num_heads=2, num_layers=2, dropout=dropout, max_length=LENGTH)


RECIPES = {
    "beauty_sasrec": beauty_sasrec,
    "beauty_hstu": beauty_hstu,
    "beauty_sasrec_cosine": beauty_sasrec_cosine,
    "beauty_hstu_cosine": beauty_hstu_cosine,
}
