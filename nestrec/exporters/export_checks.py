"""Measures a servable at export: precision cost, recall of its search, default inputs.

What fewer bits cost, measured when a model is exported, on requests made of events that validate.

A request tells what the dataset has of its user, features of every kind included. Both models are asked by the code
that serves them. Where prefixes are kept in fewer bits, they are kept and read again.

Legend: E events, U users.

Defaults that an export names are checked against its model: one that could not be taken, or never would be, is a
mistake that is better found now than by a client.

A search that does not look at every row, built over an index and measured on users of the dataset.
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

from nestrec.base.cuda import DeviceChoice, chosen_device
from nestrec.base.errors import UserError, did_you_mean
from nestrec.data.dataset import Dataset
from nestrec.data.dataset_schema import ACTIONS, ITEM_IDS, TIMESTAMPS_MS
from nestrec.data.samples.split import split_of
from nestrec.exporters.dataset_users import DatasetFeatures, DatasetUsers, reader_of
from nestrec.serving.engine.reference_runner import BatchItem, BatchItemScores, ReferenceRunner, user_queries
from nestrec.serving.kv_cache.kv_page_pool import PrefixDtype, pool_for
from nestrec.serving.model.faiss_search import FaissSearch, built, measured_recall
from nestrec.serving.model.item_id_map import KeyedTable
from nestrec.serving.model.item_search import SearchConfig
from nestrec.serving.model.model_adapter import ModelAdapter, make_form
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
    """the held-out item first, or as many of the catalogue as are looked for"""
    target: int
    label: int
    """whether the first label of a ranking model was set"""


@torch.inference_mode()
def measured_cost(
    session: Session, before: Servable, after: Servable, *, tables: str, prefixes: PrefixDtype, device: DeviceChoice
) -> QuantizationReport:
    """Of a model in fewer bits than the one of the run, as both are on a device."""
    place = _place_of(before, device)
    requests = _requests(session, before)
    is_ranking = make_form(before).appends_candidates
    full = _asked(make_form(placed(before, place)), requests, "model")
    after = placed(after, place)
    if not is_ranking:  # what both are compared on: the best of the run
        listed = [
            r._replace(candidates=_listed(r.candidates, one.items)) for r, one in zip(requests, full, strict=True)
        ]
        pairs = list(zip(full, _asked(make_form(after), listed, prefixes), strict=True))
    fewer = _asked(make_form(after), requests, prefixes)
    if is_ranking:
        pairs = list(zip(full, fewer, strict=True))
    differences = np.concatenate([np.zeros(0), *(np.abs(a.scores - b.scores).ravel() for a, b in pairs)])
    scores = np.concatenate([np.zeros(0), *(np.abs(a.scores).ravel() for a, _ in pairs)])
    metric = _auc if is_ranking else _ndcg
    weights = "run" if after.dtype == before.dtype else str(after.dtype).removeprefix("torch.")
    return QuantizationReport(
        dtype=weights,
        tables=tables,
        prefixes=prefixes,
        num_requests=len(requests),
        largest_difference=float(differences.max(initial=0.0)),
        mean_difference=float(differences.mean()) if len(differences) else 0.0,
        mean_score=float(scores.mean()) if len(scores) else 0.0,
        overlap=float(np.mean([_overlap(a, b) for a, b in zip(full, fewer, strict=True)])) if requests else 1.0,
        metric="auc" if is_ranking else f"ndcg@{_TOP}",
        before=metric(requests, full),
        after=metric(requests, fewer),
    )


def _place_of(servable: Servable, device: DeviceChoice) -> str:
    """Where models are asked; both of them are there for a moment."""
    place = chosen_device(device)
    if (device, place) != ("auto", "cuda"):
        return place
    tables = {id(table): table for table in (*servable.tables.values(), servable.index) if table is not None}
    needed = sum(part.nbytes for table in tables.values() for _, part in table.parts())
    return place if 2 * needed < torch.cuda.mem_get_info()[0] else "cpu"


def placed(servable: Servable, device: str) -> Servable:
    """The same model, with all that it computes with on a device."""
    if device == "cpu":
        return servable
    moved = {id(table): _moved(table, device) for table in servable.tables.values()}  # columns may share one
    found = replace(
        servable,
        model=deepcopy(servable.model).to(device),
        tables={name: moved[id(table)] for name, table in servable.tables.items()},
        index=None if servable.index is None else _moved(servable.index, device),
    )
    columns = {name: column.to(found.lookup_device) for name, column in servable.item_columns.items()}
    return replace(found, item_columns=columns)


def _moved(table: ServedTable, device: str) -> ServedTable:
    if isinstance(table, QuantizedTable):
        return QuantizedTable(_moved(table.packed, device), table.kind)
    if isinstance(table, KeyedTable):
        return KeyedTable(_moved(table.by_row, device), table.keys, table.begins)
    assert isinstance(table, DeviceTable)
    return DeviceTable(table.weight.to(device))


def _listed(candidates: Candidates, items: NDArray[np.int64]) -> Candidates:
    return Candidates(items=items, now_ms=candidates.now_ms, features=candidates.features)


def _requests(session: Session, servable: Servable) -> list[_Request]:
    """Users spread over the dataset, each before its last event that validates."""
    task: Any = session.cfg.task
    split = split_of(task.split, session.dataset)
    form = make_form(servable)
    users = split.users_with("valid")
    users = users[split.valid_end[users] > 1]
    chosen = np.unique(users[np.linspace(0, len(users) - 1, min(_NUM_REQUESTS, len(users))).astype(np.int64)])
    rng = np.random.default_rng(0)
    known = _known_of(session.dataset, servable, chosen)
    ends = split.valid_end[chosen].tolist()
    return [_request(form, known, place, end - 1, rng) for place, end in enumerate(ends)]


class _Known(NamedTuple):
    """What a dataset has of some users."""

    items: NDArray[np.int64]
    """(E,), as are the other columns of events"""
    offsets: NDArray[np.int64]
    """(U + 1,) where the events of each user begin, and where the last ones end"""
    times_ms: NDArray[np.int64]
    actions: NDArray[np.int64]
    of_events: Mapping[str, NDArray[np.int64]]
    """(E,) by `ColumnSpec.fields`, as the model reads them"""
    of_users: Mapping[str, NDArray[np.int64]]
    """(U,) likewise"""


def _known_of(dataset: Dataset, servable: Servable, users: NDArray[np.int64]) -> _Known:
    features = DatasetFeatures(dataset, reader_of(servable))
    rows = dataset.only((ITEM_IDS, TIMESTAMPS_MS, ACTIONS, *features.columns)).rows(users)
    items, offsets = rows.lists[ITEM_IDS]
    times_ms, actions = (
        rows.lists[name][0].astype(np.int64) if name in rows.lists else np.zeros(len(items), np.int64)
        for name in (TIMESTAMPS_MS, ACTIONS)
    )
    return _Known(
        items.astype(np.int64),
        offsets.astype(np.int64),
        times_ms,
        actions,
        features.of_events(rows, len(items)),
        features.of_users(rows),
    )


def _request(form: ModelAdapter, known: _Known, place: int, event: int, rng: np.random.Generator) -> _Request:
    servable = form.servable
    first, target = int(known.offsets[place]), int(known.offsets[place]) + event
    past = slice(first, target)
    of_user = {name: values[place] for name, values in known.of_users.items()}
    of_events = {name: values[past] for name, values in known.of_events.items()}
    asked = {name: int(value) for name, value in of_user.items()}
    asked |= {name: int(values[target]) for name, values in known.of_events.items()}
    history = History(
        items=known.items[past],
        times_ms=known.times_ms[past],
        actions=known.actions[past],
        features={**of_events, **{name: np.broadcast_to(value, event) for name, value in of_user.items()}},
        asked=asked,
    )
    now_ms, item = int(known.times_ms[target]), int(known.items[target])
    if not form.appends_candidates:
        num_best = min(_NUM_BEST, servable.spec.num_items)
        best = Candidates(items=np.zeros(0, np.int64), now_ms=now_ms, num_best=num_best, excluded=history.items)
        return _Request(history, best, item, 0)
    items = np.concatenate([[item], rng.integers(1, servable.spec.num_items + 1, _NUM_CANDIDATES - 1)])
    shown = {name: np.full(len(items), value) for name, value in asked.items()}
    label = int(bool(int(known.actions[target]) & servable.spec.action_bits[form.outputs[0]]))
    return _Request(history, Candidates(items=items, now_ms=now_ms, features=shown), item, label)


def _asked(form: ModelAdapter, requests: Sequence[_Request], prefixes: PrefixDtype) -> list[BatchItemScores]:
    servable = form.servable
    longest = servable.encoder_config.max_length if prefixes != "model" else 1
    pool = pool_for(servable, cache_bytes=0, page_tokens=longest, prefix_dtype=prefixes)
    runner = ReferenceRunner(form, pool)
    found = list[BatchItemScores]()
    for request in requests:
        tokens = form.tokens(request.history, request.candidates.now_ms)
        pages = list(range(pool.num_pages))
        first = 0
        if prefixes != "model" and tokens.num_cacheable:
            first = tokens.num_cacheable
            runner.run([BatchItem(tokens=tokens, first=0, end=first, pages=pages, store_until=first)])
        part = BatchItem(
            tokens=tokens, first=first, end=tokens.length, pages=pages, store_until=0, candidates=request.candidates
        )
        (scored,) = runner.run([part])
        assert scored is not None
        found.append(scored)
    return found


def _overlap(one: BatchItemScores, other: BatchItemScores) -> float:
    best, again = (set(_best(scored)[:_TOP].tolist()) for scored in (one, other))
    return len(best & again) / max(1, len(best))


def _best(scored: BatchItemScores) -> NDArray[np.int64]:
    return scored.items[np.argsort(-scored.scores[:, 0], kind="stable")]


def _ndcg(requests: Sequence[_Request], found: Sequence[BatchItemScores]) -> float | None:
    if not requests:
        return None
    rank = [_place(_best(one), request.target) for request, one in zip(requests, found, strict=True)]
    return float(ranking_metrics(np.array(rank), (_TOP,))[f"ndcg@{_TOP}"].mean())


def _place(items: NDArray[np.int64], target: int) -> int:
    """From 1; 0 where it is not among them."""
    where = np.flatnonzero(items == target)
    return int(where[0]) + 1 if len(where) else 0


def _auc(requests: Sequence[_Request], found: Sequence[BatchItemScores]) -> float | None:
    labels = np.array([request.label for request in requests], np.int64)
    if len(np.unique(labels)) < 2:
        return None
    return float(auc(labels, np.array([one.scores[0, 0] for one in found], np.float64)))


def check_defaults(defaults: InputDefaults, servable: Servable) -> None:
    """Raise a `UserError` that names the default."""
    if defaults.times is not None and not servable.reads_times:
        raise _unread("times", defaults.times)
    if defaults.actions is not None:
        if not servable.reads_actions:
            raise _unread("actions", list(defaults.actions))
        _check_known(defaults.actions, servable.spec.action_bits, "actions", "is no action of the model")
    _check_categories(defaults.features, servable.event_features, servable, "features")
    _check_categories(defaults.user_features, servable.user_features, servable, "user_features")
    if defaults.history is not None:
        _check_history(defaults.history, defaults, servable)


def _check_history(items: tuple[str, ...], defaults: InputDefaults, servable: Servable) -> None:
    if not items and servable.needs_event:
        remedy = "name an item: the model knows a user by nothing but events"
        raise UserError("stands for nobody", option="defaults.history", value=[], remedy=remedy)
    for key in items:
        if not servable.ids_of([key])[0]:
            remedy = "give ids of items as the log has them"
            raise UserError("is no item of the model", option="defaults.history", value=key, remedy=remedy)
    given = defaults.typed()
    missing = [(name, value) for name, value in servable.event_default_examples.items() if name not in given]
    if items and missing:
        options = " ".join(f"--defaults.{name} {shlex.quote(value)}" for name, value in missing)
        remedy = f"add {options}, which the model reads of each event"
        problem = "needs another default" if len(missing) == 1 else "needs other defaults"
        raise UserError(problem, option="defaults.history", value=list(items), remedy=remedy)


def _check_categories(
    given: Mapping[str, str | None], known: Mapping[str, ColumnSpec], servable: Servable, field: str
) -> None:
    _check_known(given, known, field, "is no category that the model reads")
    for name, value in given.items():
        column = known[name]
        if value is None or column.kind == "bag":  # any text
            continue
        if column.kind == "vector":
            remedy = "leave it out, or give none: a vector that nobody knows"
            raise UserError("is no vector", option=f"defaults.{field}.{name}", value=value, remedy=remedy)
        if column.keys is not None:
            _check_known([value], set(column.keys), f"{field}.{name}", "is no value of this category")
        elif not (value.isdecimal() and 0 <= int(value) < column.num_rows):
            remedy = f"give a whole number below {column.num_rows}"
            raise UserError(
                "is no value of this category", option=f"defaults.{field}.{name}", value=value, remedy=remedy
            )


def _check_known(given: Iterable[str], known: Any, field: str, problem: str) -> None:
    for name in given:
        if name not in known:
            raise UserError(problem, option=f"defaults.{field}", value=name, remedy=did_you_mean(name, known))


def _unread(field: str, value: Any) -> UserError:
    return UserError("is not read by the model", option=f"defaults.{field}", value=value, remedy="leave it out")


_NUM_USERS = 200


@torch.inference_mode()
def with_search(servable: Servable, cfg: SearchConfig, data: Path) -> Servable:
    """The model with what a search needs and the recall of it. data: the dataset that users are taken from."""
    index = servable.index
    if not isinstance(index, DeviceTable):
        remedy = "leave it exact"
        raise UserError(
            "is for retrieval models, which have an index", option="search.kind", value=cfg.kind, remedy=remedy
        )
    tensors = built(index.weight, cfg)
    dataset = Dataset.open(data)
    places = np.unique(np.linspace(0, dataset.num_samples - 1, _NUM_USERS).astype(np.int64))
    users = DatasetUsers(dataset, servable, context=None).read(places)
    form = make_form(servable)
    assert isinstance(form, RetrievalAdapter)
    asked = [(user.history, user.now_ms) for user in users.users(0, len(users)) if len(user.seen)]
    queries = user_queries(form, asked)
    recall = measured_recall(FaissSearch(index.weight, cfg, tensors), index.weight, queries, "users of the dataset")
    return replace(servable, search=tensors, spec=replace(servable.spec, search=cfg, recall=recall))
