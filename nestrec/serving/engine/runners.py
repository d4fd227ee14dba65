"""Which runner computes a model's batches."""

from nestrec.serving.engine.config import EngineConfig
from nestrec.serving.engine.runner import BatchRunner, Runner
from nestrec.serving.model.forms import Form, RankingForm
from nestrec.serving.prefix.page_pool import PagePool


def make_runner(form: Form, pool: PagePool, cfg: EngineConfig) -> BatchRunner:
    """Captured graphs over pages where a GPU and the model allow it, else sequence by sequence."""
    if form.encoder.position.is_cuda and isinstance(form, RankingForm):
        from nestrec.models.hstu_cached import is_pageable
        from nestrec.serving.engine.graph_runner import GraphRunner

        if is_pageable(form.encoder):
            return GraphRunner(form, pool, max_tokens=2 * cfg.max_batch_tokens + form.encoder.cfg.max_length)
    return Runner(form, pool)
