"""A runner that keeps nothing: batches of whole histories, for models that no engine serves as well."""

from dataclasses import dataclass

from nestrec.models.backbones import backbone_of
from nestrec.models.whole_forward import whole_forward
from nestrec.serving.engine.runner import Runner
from nestrec.serving.model.forms import form_of
from nestrec.serving.model.servable import Servable
from nestrec.serving.prefix.page_pool import PagePool


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is kept of a prefix where there is none."""

    num_layers: int = 1
    num_heads: int = 1
    head_dim: int = 1


def plain_runner(servable: Servable, slide_events: int | None = 1) -> Runner:
    """slide_events: events by which a full history slides; 1 as in evaluation, none as a server has it by default."""
    form, has_cached = form_of(servable, slide_events), backbone_of(servable.encoder_config).cached is not None
    kept = servable.kept if has_cached else _Kept()
    pool = PagePool(kept, num_pages=1, page_tokens=1, device=servable.device, dtype=servable.dtype)
    return Runner(form, pool, None if has_cached else whole_forward)
