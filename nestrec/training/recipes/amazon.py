"""Amazon Beauty, 5-core: leave-one-out, full ranking, whole-catalogue cross-entropy."""

from nestrec.data.batches import BatchConfig
from nestrec.data.retrieval import HistoryConfig
from nestrec.models import HSTUConfig, SASRecConfig
from nestrec.models.retrieval import EncoderConfig, SimilarityConfig
from nestrec.training.config import DataConfig, OptimizerConfig, RunConfig, TrainingConfig
from nestrec.training.tasks.catalogue_ranks import RetrievalEvaluationConfig
from nestrec.training.tasks.retrieval import RetrievalTaskConfig

LENGTH = 50


def _beauty(name: str, encoder: EncoderConfig, similarity: SimilarityConfig) -> RunConfig:
    return RunConfig(
        name=name,
        task=RetrievalTaskConfig(
            encoder=encoder,
            similarity=similarity,
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
        training=TrainingConfig(epochs=60, patience=8),
    )


# The settings of each model are the best on the validation part of a small grid; docs/results/quality.md names it.
def beauty_sasrec() -> RunConfig:
    """SASRec with cross-entropy over the whole catalogue."""
    encoder = SASRecConfig(dim=128, ffn_dim=128, num_layers=2, num_heads=2, dropout=0.5, max_length=LENGTH)
    return _beauty("beauty_sasrec", encoder, SimilarityConfig(normalise=True, temperature=0.05))


def beauty_hstu() -> RunConfig:
    """HSTU with cross-entropy over the whole catalogue."""
    encoder = HSTUConfig(dim=128, head_dim=64, num_heads=2, num_layers=2, dropout=0.6, max_length=LENGTH)
    return _beauty("beauty_hstu", encoder, SimilarityConfig(normalise=False, temperature=1.0))


RECIPES = {"beauty_sasrec": beauty_sasrec, "beauty_hstu": beauty_hstu}
