"""Which runner computes a model's batches."""

from typing import cast

from nestrec.base.seam import resolved
from nestrec.ops.attention.paged.blocks import can_be_paged
from nestrec.serving.engine.config import EngineConfig
from nestrec.serving.engine.runner import BatchRunner, Runner
from nestrec.serving.model.forms import Form, PagedForm
from nestrec.serving.model.ranking_form import RankingForm
from nestrec.serving.model.retrieval_form import RetrievalForm
from nestrec.serving.prefix.page_pool import PagePool


def make_runner(form: Form, pool: PagePool, cfg: EngineConfig) -> BatchRunner:
    """Captured graphs over pages where a GPU and the model allow it, else sequence by sequence."""
    servable, paged = form.servable, form.servable.cached.paged
    has_graphs = (
        cfg.captured
        and servable.device.type == "cuda"
        and can_be_paged(pool.tensor.shape[-1], servable.dtype.itemsize, pool.page_tokens)
    )
    if has_graphs and paged is not None and isinstance(form, RankingForm | RetrievalForm):
        from nestrec.serving.engine.graph_runner import GraphRunner

        encoder = resolved(paged)(form.encoder, pool.kept_pages)
        max_length = servable.encoder_config.max_length
        max_tokens = 2 * cfg.max_batch_tokens + max_length
        if isinstance(form, RetrievalForm):  # candidates are no tokens: many a graph would never be filled
            max_tokens = min(max_tokens, cfg.max_batch_requests * max_length)
        return GraphRunner(cast(PagedForm, form), encoder, pool, max_tokens=max_tokens)
    return Runner(form, pool)
