"""Which runner computes a model's batches."""

from nestrec.serving.engine.config import EngineConfig
from nestrec.serving.engine.runner import BatchRunner, Runner
from nestrec.serving.model.forms import Form
from nestrec.serving.model.ranking_form import RankingForm
from nestrec.serving.prefix.page_pool import PagePool


def make_runner(form: Form, pool: PagePool, cfg: EngineConfig) -> BatchRunner:
    """Captured graphs over pages where a GPU and the model allow it, else sequence by sequence."""
    servable = form.servable
    if servable.device.type == "cuda" and isinstance(form, RankingForm) and servable.cached.is_pageable(form.encoder):
        from nestrec.serving.engine.graph_runner import GraphRunner

        return GraphRunner(form, pool, max_tokens=2 * cfg.max_batch_tokens + servable.encoder_config.max_length)
    return Runner(form, pool)
