"""What users are multiplied with items by: the queries of a retrieval model."""

from collections.abc import Sequence

import torch

from nestrec.serving.engine.runner import Part, Runner
from nestrec.serving.model.inputs import History
from nestrec.serving.model.retrieval_form import RetrievalForm


def user_queries(runner: Runner, users: Sequence[tuple[History, int]]) -> torch.Tensor:
    """(users, D) for each (history, moment): its product with an item's vector is the item's score. Zeros for those
    without events."""
    form = runner.form
    assert isinstance(form, RetrievalForm)
    parts = []
    for history, now_ms in users:
        tokens = form.tokens(history, now_ms)
        parts.append(Part(tokens=tokens, first=0, end=tokens.length, pages=[], store_until=0))
    return form.queries([states[-1] if len(states) else None for states in runner.states(parts)])
