"""A batch inference job that a test can start on several ranks."""

from pathlib import Path

from nestrec.inference.batch_inference import BatchJobConfig, BatchRecommender
from nestrec.serving.model.servable import Servable

CFG = BatchJobConfig(k=7, part_users=20, max_batch_tokens=200)


def recommend_on(topology, folder: Path, users: str, output: Path, data: Path, cfg=CFG) -> int:  # noqa: PLR0917
    return BatchRecommender(Servable.load(folder), cfg, topology).recommend(users, output, data=data)
