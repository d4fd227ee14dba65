"""A request whose scores an export records, and which a server must answer alike before the model goes live.

Digests tell that files are those that were written; the probe tells that they mean here what they meant there: that
this version of the code, on this device, reads weights, tables and ids as the export did.
"""

import copy
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.errors import CorruptFileError
from nestrec.serving.engine.reference_runner import BatchItem, BatchRunner, ReferenceRunner
from nestrec.serving.kv_cache.kv_page_pool import PagePool
from nestrec.serving.model.item_id_map import KeyedTable
from nestrec.serving.model.model_adapter import ModelAdapter, make_form
from nestrec.serving.model.request_inputs import Candidates, History, number_bits
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import GoldenRequest, shown_version

_NUM_EVENTS, _NUM_CANDIDATES = 4, 8
_FIRST_MS, _STEP_MS = 1_700_000_000_000, 60_000
_TOLERANCE, _TOLERANCE_OF_HALVES = 0.02, 0.1
"""of the largest score: kernels of another device round otherwise, and a model that is not this one is far off"""


def recorded_probe(servable: Servable) -> GoldenRequest:
    """A request of made-up events over the catalogue, and what the model says to it on the CPU."""
    model = copy.deepcopy(servable.model).eval().requires_grad_(False)
    form = make_form(replace(servable, model=model))
    num_events = max(1, min(_NUM_EVENTS, form.max_events)) if servable.reads_items else 0
    names = servable.item_keys if servable.reads_items else tuple(str(name) for name in range(_NUM_CANDIDATES))
    asked = GoldenRequest(
        items=_spread(servable.item_keys, num_events),
        times_ms=tuple(_FIRST_MS + _STEP_MS * event for event in range(num_events)),
        actions=tuple(event % (1 + max(servable.spec.action_bits.values(), default=0)) for event in range(num_events)),
        candidates=_spread(names, min(_NUM_CANDIDATES, len(names))),
        now_ms=_FIRST_MS + _STEP_MS * num_events,
        scores=(),
    )
    served = form.servable
    pool = PagePool(served.kept, num_pages=1, page_tokens=1, device=served.device, dtype=served.dtype)
    scores = _scores(ReferenceRunner(form, pool), asked)
    return replace(asked, scores=tuple(tuple(map(float, row)) for row in scores))


def check_probe(runner: BatchRunner) -> None:
    """`CorruptFileError` where the model does not score as its export did; a model without a probe passes."""
    probe = runner.form.servable.probe
    if probe is None:
        return
    recorded = np.array(probe.scores, np.float64)
    found = _scores(runner, probe).astype(np.float64)
    is_half = runner.form.servable.dtype.itemsize < torch.float32.itemsize
    allowed = (_TOLERANCE_OF_HALVES if is_half else _TOLERANCE) * max(1e-6, float(np.abs(recorded).max(initial=0.0)))
    if recorded.shape == found.shape and bool((np.abs(found - recorded) <= allowed).all()):
        return
    raise CorruptFileError(
        "does not score the request of its export as it did then",
        option="model",
        value=shown_version(runner.form.servable.version),
        remedy="export the run again with the version that serves it",
    )


def _scores(runner: BatchRunner, probe: GoldenRequest) -> NDArray[np.float32]:
    part = _part(runner.form, probe)
    scored = runner.launch([part]).wait()[0][0]
    assert scored is not None
    return scored.scores


def _part(form: ModelAdapter, probe: GoldenRequest) -> BatchItem:
    servable = form.servable
    history = History(
        items=servable.ids_of(probe.items),
        times_ms=np.array(probe.times_ms, np.int64),
        actions=np.array(probe.actions, np.int64),
        features=_features(servable, len(probe.items)),
    )
    tokens = form.tokens(history, probe.now_ms)
    candidates = Candidates(
        items=servable.ids_of(probe.candidates),
        now_ms=probe.now_ms,
        features=_features(servable, len(probe.candidates)),
    )
    return BatchItem(tokens=tokens, first=0, end=tokens.length, pages=[], store_until=0, candidates=candidates)


def _features(servable: Servable, count: int) -> dict[str, NDArray[np.int64]]:
    """Categories by turns, those that a request gives."""
    given = servable.given_fields
    numbers = number_bits(np.arange(count, dtype=np.float32))
    places = np.arange(count)
    found = {n: places % max(1, column.num_rows) if column.has_table else numbers for n, column in given.items()}
    keyed = {n: t.keys for n, t in servable.tables.items() if isinstance(t, KeyedTable) and len(t.keys)}
    return found | {name: keys[places % len(keys)] for name, keys in keyed.items()}


def _spread(keys: tuple[str, ...], count: int) -> tuple[str, ...]:
    """So many of them, from one end to the other."""
    places: Iterable[float] = np.linspace(0, len(keys) - 1, count)
    return tuple(keys[int(place)] for place in places)
