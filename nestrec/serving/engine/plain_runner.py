"""A runner that keeps nothing: batches of whole histories."""

from nestrec.serving.engine.runner import Runner
from nestrec.serving.model.forms import make_form
from nestrec.serving.model.servable import Servable
from nestrec.serving.prefix.page_pool import PagePool


def plain_runner(servable: Servable, slide_events: int | None = None) -> Runner:
    """slide_events: events by which a full history slides; none takes what the model was measured with."""
    pool = PagePool(servable.kept, num_pages=1, page_tokens=1, device=servable.device, dtype=servable.dtype)
    return Runner(make_form(servable, slide_events), pool)
