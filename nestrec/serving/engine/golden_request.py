"""Golden request: its scores are recorded at export, and a server must reproduce them before the model goes live.

Checksums verify that files are unchanged. The golden request verifies in addition that this version of the code, on
this device, interprets weights, tables and ids as the export did.
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
from nestrec.serving.model.model_adapter import ModelAdapter, make_adapter
from nestrec.serving.model.request_inputs import Candidates, History, number_bits
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import GoldenRequest, short_version

_NUM_EVENTS, _NUM_CANDIDATES = 4, 8
_FIRST_MS, _STEP_MS = 1_700_000_000_000, 60_000
_TOLERANCE, _TOLERANCE_OF_HALVES = 0.02, 0.1
"""Tolerances relative to the largest score, for float32 and for 16-bit models: kernels of different devices round
differently, while the scores of a wrong model differ by much more."""


def record_golden_request(servable: Servable) -> GoldenRequest:
    """Return a request of synthetic events over the catalog, with the scores that the model computes on the CPU."""
    model = copy.deepcopy(servable.model).eval().requires_grad_(False)
    adapter = make_adapter(replace(servable, model=model))
    num_events = max(1, min(_NUM_EVENTS, adapter.max_events)) if servable.reads_items else 0
    names = servable.item_keys if servable.reads_items else tuple(str(name) for name in range(_NUM_CANDIDATES))
    request = GoldenRequest(
        items=_spread(servable.item_keys, num_events),
        times_ms=tuple(_FIRST_MS + _STEP_MS * event for event in range(num_events)),
        actions=tuple(event % (1 + max(servable.spec.action_bits.values(), default=0)) for event in range(num_events)),
        candidates=_spread(names, min(_NUM_CANDIDATES, len(names))),
        now_ms=_FIRST_MS + _STEP_MS * num_events,
        scores=(),
    )
    served = adapter.servable
    pool = PagePool(served.cache_spec, num_pages=1, page_tokens=1, device=served.device, dtype=served.dtype)
    scores = _scores(ReferenceRunner(adapter, pool), request)
    return replace(request, scores=tuple(tuple(map(float, row)) for row in scores))


def check_golden_request(runner: BatchRunner) -> None:
    """Check that the model reproduces the scores recorded at export; a model without a golden request passes.

    Raises:
        CorruptFileError: The scores differ.
    """
    request = runner.adapter.servable.golden_request
    if request is None:
        return
    recorded = np.array(request.scores, np.float64)
    computed = _scores(runner, request).astype(np.float64)
    is_half = runner.adapter.servable.dtype.itemsize < torch.float32.itemsize
    tolerance = (_TOLERANCE_OF_HALVES if is_half else _TOLERANCE) * max(1e-6, float(np.abs(recorded).max(initial=0.0)))
    if recorded.shape == computed.shape and bool((np.abs(computed - recorded) <= tolerance).all()):
        return
    raise CorruptFileError(
        "the model does not reproduce the scores that were recorded for the golden request at export",
        option="model",
        value=short_version(runner.adapter.servable.version),
        remedy="export the run again with the nestrec version that serves it",
    )


def _scores(runner: BatchRunner, request: GoldenRequest) -> NDArray[np.float32]:
    item = _make_item(runner.adapter, request)
    scored = runner.launch([item]).wait()[0][0]
    assert scored is not None
    return scored.scores


def _make_item(adapter: ModelAdapter, request: GoldenRequest) -> BatchItem:
    servable = adapter.servable
    history = History(
        items=servable.ids_of(request.items),
        times_ms=np.array(request.times_ms, np.int64),
        actions=np.array(request.actions, np.int64),
        features=_features(servable, len(request.items)),
    )
    tokens = adapter.tokens(history, request.now_ms)
    candidates = Candidates(
        items=servable.ids_of(request.candidates),
        now_ms=request.now_ms,
        features=_features(servable, len(request.candidates)),
    )
    return BatchItem(tokens=tokens, first=0, end=tokens.length, pages=[], store_until=0, candidates=candidates)


def _features(servable: Servable, count: int) -> dict[str, NDArray[np.int64]]:
    """Return values of all features that requests contain, cycling through their categories."""
    fields = servable.request_fields
    numbers = number_bits(np.arange(count, dtype=np.float32))
    indices = np.arange(count)
    features = {n: indices % max(1, column.num_rows) if column.has_table else numbers for n, column in fields.items()}
    keyed = {n: t.keys for n, t in servable.tables.items() if isinstance(t, KeyedTable) and len(t.keys)}
    return features | {name: keys[indices % len(keys)] for name, keys in keyed.items()}


def _spread(keys: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Return `count` keys, evenly spaced over all keys."""
    positions: Iterable[float] = np.linspace(0, len(keys) - 1, count)
    return tuple(keys[int(position)] for position in positions)
