"""Recipes that need no download: synthetic logs, minutes on two CPU cores."""

from nestrec.data.batches import BatchConfig
from nestrec.data.samples.retrieval import HistoryConfig
from nestrec.models import FuXiConfig, HSTUConfig, SASRecConfig
from nestrec.models.backbones import EncoderConfig
from nestrec.models.retrieval import SimilarityConfig
from nestrec.pipeline.dense.options import OptimizerConfig
from nestrec.tasks.catalogue_ranks import RetrievalEvaluationConfig
from nestrec.tasks.retrieval import RetrievalTaskConfig
from nestrec.training.config import DataConfig, RunConfig, TrainingConfig

LENGTH = 64


def _demo(name: str, encoder: EncoderConfig) -> RunConfig:
    return RunConfig(
        name=name,
        task=RetrievalTaskConfig(
            encoder=encoder,
            history=HistoryConfig(max_length=LENGTH, slide_events=1),
            similarity=SimilarityConfig(temperature=0.1),
            num_negatives=128,
            evaluation=RetrievalEvaluationConfig(ks=(10, 50)),
        ),
        data=DataConfig(folder="data/synthetic-interests", synthetic="interests"),
        batch=BatchConfig(batch_samples=64),
        optimizer=OptimizerConfig(learning_rate=3e-3),
        training=TrainingConfig(epochs=14),
    )


def demo() -> RunConfig:
    """HSTU with position and time bias on synthetic logs."""
    return _demo("demo", HSTUConfig(dim=48, head_dim=24, num_heads=2, num_layers=2, max_length=LENGTH, time_bias=True))


def demo_fuxi() -> RunConfig:
    """FuXi-alpha on the same logs."""
    return _demo("demo_fuxi", FuXiConfig(dim=48, head_dim=24, num_heads=2, ffn_dim=48, num_layers=2, max_length=LENGTH))


def demo_sasrec() -> RunConfig:
    """SASRec on the same logs."""
    return _demo("demo_sasrec", SASRecConfig(dim=48, ffn_dim=48, num_layers=2, max_length=LENGTH))


RECIPES = {"demo": demo, "demo_fuxi": demo_fuxi, "demo_sasrec": demo_sasrec}
