"""Checks and measures a servable when it is exported: quantization loss, default inputs, recall of ANN search.

- `measure_quantization` compares a quantized model with the original on requests built from the validation events of
  the dataset. Both models run through the serving code; if the KV cache is quantized, prefixes are written to it and
  read again.
- `check_defaults` validates the default inputs of an export, so that an unusable default fails at export and not at the
  first request.
- `add_search_index` builds the index for approximate nearest neighbor (ANN) search and measures its recall on users of
  the dataset.

Legend: E events, U users.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.cuda import DeviceChoice, resolve_device
from nestrec.base.errors import UserError, did_you_mean
from nestrec.data.dataset import Dataset
from nestrec.data.dataset_schema import ACTIONS, ITEM_IDS, TIMESTAMPS_MS
from nestrec.data.samples.split import split_dataset
from nestrec.exporters.dataset_users import DatasetFeatures, DatasetUsers, make_request_resolver
from nestrec.serving.engine.reference_runner import BatchItem, BatchItemScores, ReferenceRunner, user_queries
from nestrec.serving.kv_cache.kv_page_pool import KVCacheDtype, pool_for
from nestrec.serving.model.faiss_search import FaissSearch, build_index, measure_recall
from nestrec.serving.model.item_id_map import KeyedTable
from nestrec.serving.model.item_search import SearchConfig
from nestrec.serving.model.model_adapter import ModelAdapter, make_adapter
from nestrec.serving.model.request_inputs import Candidates, History
from nestrec.serving.model.retrieval_adapter import RetrievalAdapter
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import ColumnSpec, InputDefaults, QuantizationReport
from nestrec.serving.model.served_tables import DeviceTable, QuantizedTable, ServedTable
from nestrec.tasks.metrics import auc, ranking_metrics
from nestrec.training.training_session import Session

_NUM_REQUESTS, _NUM_CANDIDATES, _NUM_BEST, _TOP = 200, 50, 100, 10


class _Request(NamedTuple):
    history: History
    candidates: Candidates
    """The held-out item and random others for a ranking model; the number of results for a retrieval model."""
    target: int
    label: int
    """1 if the first label of a ranking model was set, otherwise 0."""


@torch.inference_mode()
def measure_quantization(
    session: Session,
    before: Servable,
    after: Servable,
    *,
    table_dtype: str,
    kv_cache_dtype: KVCacheDtype,
    device: DeviceChoice,
) -> QuantizationReport:
    """Measure the quality loss of a quantized model.

    Args:
        session: Session of the run, whose dataset provides the requests.
        before: Model with the precision of the run.
        after: The same model, quantized.
        table_dtype: Data type of the quantized tables, for the report.
        kv_cache_dtype: Data type of the KV cache of the quantized model.
        device: Device on which both models run.
    """
    target_device = _select_device(before, device)
    requests = _requests(session, before)
    is_ranking = make_adapter(before).appends_candidates
    full = _score(make_adapter(move_servable(before, target_device)), requests, "model")
    after = move_servable(after, target_device)
    if not is_ranking:  # differences need scores of the same items: the best of the original model
        same_items = [
            r._replace(candidates=_with_items(r.candidates, one.items)) for r, one in zip(requests, full, strict=True)
        ]
        pairs = list(zip(full, _score(make_adapter(after), same_items, kv_cache_dtype), strict=True))
    quantized = _score(make_adapter(after), requests, kv_cache_dtype)
    if is_ranking:
        pairs = list(zip(full, quantized, strict=True))
    differences = np.concatenate([np.zeros(0), *(np.abs(a.scores - b.scores).ravel() for a, b in pairs)])
    scores = np.concatenate([np.zeros(0), *(np.abs(a.scores).ravel() for a, _ in pairs)])
    metric = _auc if is_ranking else _ndcg
    weights = "run" if after.dtype == before.dtype else str(after.dtype).removeprefix("torch.")
    return QuantizationReport(
        dtype=weights,
        tables=table_dtype,
        prefixes=kv_cache_dtype,
        num_requests=len(requests),
        largest_difference=float(differences.max(initial=0.0)),
        mean_difference=float(differences.mean()) if len(differences) else 0.0,
        mean_score=float(scores.mean()) if len(scores) else 0.0,
        overlap=float(np.mean([_overlap(a, b) for a, b in zip(full, quantized, strict=True)])) if requests else 1.0,
        metric="auc" if is_ranking else f"ndcg@{_TOP}",
        before=metric(requests, full),
        after=metric(requests, quantized),
    )


def _select_device(servable: Servable, device: DeviceChoice) -> str:
    """Return the device to measure on; `auto` falls back to the CPU if the GPU cannot hold both models at once."""
    name = resolve_device(device)
    if (device, name) != ("auto", "cuda"):
        return name
    tables = {id(table): table for table in (*servable.tables.values(), servable.index) if table is not None}
    needed = sum(part.nbytes for table in tables.values() for _, part in table.parts())
    return name if 2 * needed < torch.cuda.mem_get_info()[0] else "cpu"


def move_servable(servable: Servable, device: str) -> Servable:
    """Return a copy of the model with its weights, tables and index on a device."""
    if device == "cpu":
        return servable
    moved = {id(table): _move_table(table, device) for table in servable.tables.values()}  # columns may share one
    result = replace(
        servable,
        model=deepcopy(servable.model).to(device),
        tables={name: moved[id(table)] for name, table in servable.tables.items()},
        index=None if servable.index is None else _move_table(servable.index, device),
    )
    columns = {name: column.to(result.lookup_device) for name, column in servable.item_columns.items()}
    return replace(result, item_columns=columns)


def _move_table(table: ServedTable, device: str) -> ServedTable:
    if isinstance(table, QuantizedTable):
        return QuantizedTable(_move_table(table.byte_table, device), table.kind)
    if isinstance(table, KeyedTable):
        return KeyedTable(_move_table(table.row_table, device), table.keys, table.spec)
    assert isinstance(table, DeviceTable)
    return DeviceTable(table.weight.to(device))


def _with_items(candidates: Candidates, items: NDArray[np.int64]) -> Candidates:
    return Candidates(items=items, now_ms=candidates.now_ms, features=candidates.features)


def _requests(session: Session, servable: Servable) -> list[_Request]:
    """Return requests of users spread evenly over the dataset, each just before its last validation event."""
    task: Any = session.cfg.task
    split = split_dataset(task.split, session.dataset)
    adapter = make_adapter(servable)
    users = split.users_with("valid")
    users = users[split.valid_end[users] > 1]
    chosen = np.unique(users[np.linspace(0, len(users) - 1, min(_NUM_REQUESTS, len(users))).astype(np.int64)])
    rng = np.random.default_rng(0)
    rows = _read_user_rows(session.dataset, servable, chosen)
    ends = split.valid_end[chosen].tolist()
    return [_request(adapter, rows, index, end - 1, rng) for index, end in enumerate(ends)]


class _UserRows(NamedTuple):
    """Events and features of some users of a dataset."""

    items: NDArray[np.int64]
    """(E,) item ids; `times_ms` and `actions` have the same shape."""
    offsets: NDArray[np.int64]
    """(U + 1,) offsets of the events of each user."""
    times_ms: NDArray[np.int64]
    actions: NDArray[np.int64]
    event_features: Mapping[str, NDArray[np.int64]]
    """(E,) values of each field (`ColumnSpec.fields`) of the event features, in ids of the model."""
    user_features: Mapping[str, NDArray[np.int64]]
    """(U,) values of each field of the user features."""


def _read_user_rows(dataset: Dataset, servable: Servable, users: NDArray[np.int64]) -> _UserRows:
    features = DatasetFeatures(dataset, make_request_resolver(servable))
    rows = dataset.select_columns((ITEM_IDS, TIMESTAMPS_MS, ACTIONS, *features.columns)).rows(users)
    items, offsets = rows.lists[ITEM_IDS]
    times_ms, actions = (
        rows.lists[name][0].astype(np.int64) if name in rows.lists else np.zeros(len(items), np.int64)
        for name in (TIMESTAMPS_MS, ACTIONS)
    )
    return _UserRows(
        items.astype(np.int64),
        offsets.astype(np.int64),
        times_ms,
        actions,
        features.event_features(rows, len(items)),
        features.user_features(rows),
    )


def _request(adapter: ModelAdapter, rows: _UserRows, index: int, event: int, rng: np.random.Generator) -> _Request:
    servable = adapter.servable
    first, target = int(rows.offsets[index]), int(rows.offsets[index]) + event
    past = slice(first, target)
    user_features = {name: values[index] for name, values in rows.user_features.items()}
    event_features = {name: values[past] for name, values in rows.event_features.items()}
    query_features = {name: int(value) for name, value in user_features.items()}
    query_features |= {name: int(values[target]) for name, values in rows.event_features.items()}
    history = History(
        items=rows.items[past],
        times_ms=rows.times_ms[past],
        actions=rows.actions[past],
        features={**event_features, **{name: np.broadcast_to(value, event) for name, value in user_features.items()}},
        query_features=query_features,
    )
    now_ms, item = int(rows.times_ms[target]), int(rows.items[target])
    if not adapter.appends_candidates:
        num_best = min(_NUM_BEST, servable.spec.num_items)
        best = Candidates(items=np.zeros(0, np.int64), now_ms=now_ms, num_best=num_best, excluded=history.items)
        return _Request(history, best, item, 0)
    items = np.concatenate([[item], rng.integers(1, servable.spec.num_items + 1, _NUM_CANDIDATES - 1)])
    candidate_features = {name: np.full(len(items), value) for name, value in query_features.items()}
    label = int(bool(int(rows.actions[target]) & servable.spec.action_bits[adapter.outputs[0]]))
    return _Request(history, Candidates(items=items, now_ms=now_ms, features=candidate_features), item, label)


def _score(adapter: ModelAdapter, requests: Sequence[_Request], kv_cache_dtype: KVCacheDtype) -> list[BatchItemScores]:
    servable = adapter.servable
    longest = servable.encoder_config.max_length if kv_cache_dtype != "model" else 1
    pool = pool_for(servable, cache_bytes=0, page_tokens=longest, kv_cache_dtype=kv_cache_dtype)
    runner = ReferenceRunner(adapter, pool)
    results = list[BatchItemScores]()
    for request in requests:
        tokens = adapter.tokens(request.history, request.candidates.now_ms)
        pages = list(range(pool.num_pages))
        first = 0
        if kv_cache_dtype != "model" and tokens.num_cacheable:
            first = tokens.num_cacheable
            runner.run([BatchItem(tokens=tokens, first=0, end=first, pages=pages, store_until=first)])
        item = BatchItem(
            tokens=tokens, first=first, end=tokens.length, pages=pages, store_until=0, candidates=request.candidates
        )
        (scores,) = runner.run([item])
        assert scores is not None
        results.append(scores)
    return results


def _overlap(one: BatchItemScores, other: BatchItemScores) -> float:
    best, other_best = (set(_best(scores)[:_TOP].tolist()) for scores in (one, other))
    return len(best & other_best) / max(1, len(best))


def _best(scores: BatchItemScores) -> NDArray[np.int64]:
    return scores.items[np.argsort(-scores.scores[:, 0], kind="stable")]


def _ndcg(requests: Sequence[_Request], results: Sequence[BatchItemScores]) -> float | None:
    if not requests:
        return None
    ranks = [_rank_of(_best(one), request.target) for request, one in zip(requests, results, strict=True)]
    return float(ranking_metrics(np.array(ranks), (_TOP,))[f"ndcg@{_TOP}"].mean())


def _rank_of(items: NDArray[np.int64], target: int) -> int:
    """Return the rank of the target, from 1; 0 if it is not among the items."""
    matches = np.flatnonzero(items == target)
    return int(matches[0]) + 1 if len(matches) else 0


def _auc(requests: Sequence[_Request], results: Sequence[BatchItemScores]) -> float | None:
    labels = np.array([request.label for request in requests], np.int64)
    if len(np.unique(labels)) < 2:
        return None
    return float(auc(labels, np.array([one.scores[0, 0] for one in results], np.float64)))


def check_defaults(defaults: InputDefaults, servable: Servable) -> None:
    """Check the default inputs of an export against its model.

    Raises:
        UserError: The model does not read an input that has a default, or cannot use the value.
    """
    if defaults.times is not None and not servable.reads_times:
        raise _unused_default("times", defaults.times)
    if defaults.actions is not None:
        if not servable.reads_actions:
            raise _unused_default("actions", list(defaults.actions))
        _check_known(defaults.actions, servable.spec.action_bits, "actions", "the model does not know this action")
    _check_categories(defaults.features, servable.event_features, servable, "features")
    _check_categories(defaults.user_features, servable.user_features, servable, "user_features")
    if defaults.history is not None:
        _check_history(defaults.history, defaults, servable)


def _check_history(items: tuple[str, ...], defaults: InputDefaults, servable: Servable) -> None:
    if not items and servable.needs_event:
        remedy = "name at least one item id: the model needs at least one event"
        raise UserError("the default history is empty", option="defaults.history", value=[], remedy=remedy)
    for key in items:
        if not servable.ids_of([key])[0]:
            remedy = "use item ids as they occur in the log"
            raise UserError("the model does not know this item", option="defaults.history", value=key, remedy=remedy)
    options_set = defaults.to_options()
    missing = [(name, value) for name, value in servable.event_default_examples.items() if name not in options_set]
    if items and missing:
        options = " ".join(f"--defaults.{name} {shlex.quote(value)}" for name, value in missing)
        remedy = f"add {options}, which the model reads of each event"
        problem = "requires another default" if len(missing) == 1 else "requires other defaults"
        raise UserError(problem, option="defaults.history", value=list(items), remedy=remedy)


def _check_categories(
    defaults: Mapping[str, str | None], columns: Mapping[str, ColumnSpec], servable: Servable, field: str
) -> None:
    _check_known(defaults, columns, field, "the model does not read this feature")
    for name, value in defaults.items():
        column = columns[name]
        if value is None or column.kind == "bag":  # any text
            continue
        if column.kind == "vector":
            remedy = "remove it, or set none for an unknown vector"
            raise UserError("must be none for a vector", option=f"defaults.{field}.{name}", value=value, remedy=remedy)
        if column.keys is not None:
            _check_known([value], set(column.keys), f"{field}.{name}", "the model does not know this value")
        elif not (value.isdecimal() and 0 <= int(value) < column.num_rows):
            remedy = f"use an integer from 0 to {column.num_rows - 1}"
            raise UserError(
                "the model does not know this value", option=f"defaults.{field}.{name}", value=value, remedy=remedy
            )


def _check_known(names: Iterable[str], known: Any, field: str, problem: str) -> None:
    for name in names:
        if name not in known:
            raise UserError(problem, option=f"defaults.{field}", value=name, remedy=did_you_mean(name, known))


def _unused_default(field: str, value: Any) -> UserError:
    return UserError("the model does not read this input", option=f"defaults.{field}", value=value, remedy="remove it")


_NUM_USERS = 200


@torch.inference_mode()
def add_search_index(servable: Servable, cfg: SearchConfig, data: Path) -> Servable:
    """Build the index for approximate nearest neighbor (ANN) search and measure its recall.

    Args:
        servable: A retrieval model.
        cfg: Search options.
        data: Dataset folder from which the users of the recall measurement are drawn.

    Returns:
        The model with the search index and its recall.

    Raises:
        UserError: The model has no retrieval index.
    """
    index = servable.index
    if not isinstance(index, DeviceTable):
        remedy = "use --search.kind exact"
        raise UserError(
            "only retrieval models have an index to search", option="search.kind", value=cfg.kind, remedy=remedy
        )
    tensors = build_index(index.weight, cfg)
    dataset = Dataset.open(data)
    indices = np.unique(np.linspace(0, dataset.num_samples - 1, _NUM_USERS).astype(np.int64))
    users = DatasetUsers(dataset, servable, context=None).read(indices)
    adapter = make_adapter(servable)
    assert isinstance(adapter, RetrievalAdapter)
    inputs = [(user.history, user.now_ms) for user in users.users(0, len(users)) if len(user.seen)]
    queries = user_queries(adapter, inputs)
    recall = measure_recall(FaissSearch(index.weight, cfg, tensors), index.weight, queries, "users of the dataset")
    return replace(servable, search=tensors, spec=replace(servable.spec, search=cfg, recall=recall))
