"""Amazon Beauty, 5-core: leave-one-out, full ranking, whole-catalogue cross-entropy."""

from nestrec.data.batches import BatchConfig
from nestrec.data.retrieval import HistoryConfig
from nestrec.models import HSTUConfig, SASRecConfig
from nestrec.models.retrieval import EncoderConfig, SimilarityConfig
from nestrec.training.config import DataConfig, OptimizerConfig, RunConfig, TrainingConfig
from nestrec.training.tasks.retrieval import RetrievalEvaluationConfig, RetrievalTaskConfig

LENGTH = 50


def _beauty(name: str, encoder: EncoderConfig) -> RunConfig:
    return RunConfig(
        name=name,
        task=RetrievalTaskConfig(
            encoder=encoder,
            similarity=SimilarityConfig(normalise=True, temperature=0.07),
            history=HistoryConfig(max_length=LENGTH),
            loss="full",
            evaluation=RetrievalEvaluationConfig(ks=(10, 50), filter_seen="history"),
        ),
        data=DataConfig(
            folder="data/beauty",
            prepare="nestrec prepare user_lines Beauty.txt data/beauty (S3Rec's file of Amazon Beauty)",
        ),
        batch=BatchConfig(batch_samples=256),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        training=TrainingConfig(epochs=100, patience=10),
    )


def beauty_sasrec() -> RunConfig:
    """SASRec with cross-entropy over the whole catalogue."""
    return _beauty(
        "beauty_sasrec", SASRecConfig(dim=64, ffn_dim=64, num_layers=2, num_heads=2, dropout=0.5, max_length=LENGTH)
    )


def beauty_hstu() -> RunConfig:
    """HSTU with cross-entropy over the whole catalogue."""
    encoder = HSTUConfig(dim=64, head_dim=32, num_heads=2, num_layers=2, dropout=0.5, max_length=LENGTH)
    return _beauty("beauty_hstu", encoder)


RECIPES = {"beauty_sasrec": beauty_sasrec, "beauty_hstu": beauty_hstu}
