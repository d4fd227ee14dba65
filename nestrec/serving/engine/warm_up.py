"""A few batches of made-up work before the first request: allocations and threads exist, and costs are known."""

import numpy as np

from nestrec.serving.engine.cost_model import EngineCostModel
from nestrec.serving.engine.runner import BatchRunner, Part
from nestrec.serving.model.forms import Form
from nestrec.serving.model.inputs import Candidates, History

_ROUNDS = 3
_SIZES = ((1, 1), (8, 16), (64, 32), (256, 16), (16, 256), (1024, 64), (4096, 256))
"""(events, candidates)"""


def warm_up(runner: BatchRunner, costs: EngineCostModel) -> None:
    """Run batches of several sizes; those of the first round are not counted."""
    for number in range(_ROUNDS):
        for num_events, num_candidates in _SIZES:
            if num_events > runner.warm_events:
                continue
            part = _part(runner.form, min(num_events, runner.form.max_events), num_candidates)
            _, seconds = runner.launch([part]).wait()
            if number > 0:
                costs.observe(*costs.work(*part.extent), seconds)


def compute_one(runner: BatchRunner) -> None:
    """Run the smallest batch, and raise whatever it raises."""
    runner.launch([_part(runner.form, 1, 1)]).wait()


def _part(form: Form, num_events: int, num_candidates: int) -> Part:
    zeros, asked = np.zeros(num_events, np.int64), np.zeros(num_candidates, np.int64)
    servable = form.servable
    fields = servable.given_fields
    history = History(items=zeros, times_ms=zeros, actions=zeros, features=dict.fromkeys(fields, zeros))
    tokens = form.tokens(history, 0)
    candidates = Candidates(items=asked, now_ms=0, features=dict.fromkeys(fields, asked))
    if servable.index is not None and servable.device.type == "cuda":  # what it costs to find items is in their graph
        candidates = Candidates(items=asked[:0], now_ms=0, num_best=num_candidates)
    return Part(tokens=tokens, first=0, end=tokens.length, pages=[], store_until=0, candidates=candidates)
