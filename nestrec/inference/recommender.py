"""A trained model for Python users: what to recommend, how candidates rank, vectors of items; all by source ids.

    model = nestrec.load("runs/demo")                        # a run, or a folder that `nestrec export` wrote
    history = {"items": ["12", "7"], "times_ms": [1642271351894, 1642271387634]}
    model.recommend(history, k=5).items
    model.rank_all([history, history], candidates=[["5", "9"], ["5"]])

A history is a mapping with the fields of the server's requests (`items`, `times_ms`, `actions`, `features`,
`user_features`, `now_ms`), or a list of ids, oldest first, where the model reads nothing else of it. Answers are those
of the server: the same code reads histories and scores candidates.
"""

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.cuda import known_device
from nestrec.base.errors import UserError
from nestrec.distributed.topology import check_device
from nestrec.inference.request_parsing import NO_LIMITS, History, Items, asked_request, explained, plain_ids
from nestrec.serving.engine.reference_runner import BatchItem, BatchItemScores, plain_runner
from nestrec.serving.model.request_inputs import Candidates
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import MANIFEST_FILE
from nestrec.serving.model.served_tables import DeviceTable
from nestrec.serving.versions.live_version import open_source, source_of
from nestrec.training.run_folder import RunFolder

if TYPE_CHECKING:
    from nestrec.distributed import Topology
    from nestrec.inference.batch_inference import BatchJobConfig, BatchRecommender
    from nestrec.serving.inputs.request_resolver import RequestResolver, ResolvedRequest
    from nestrec.serving.inputs.request_schema import RankRequest


_LAST = np.finfo(np.float32).min
"""score of candidates that the model does not know, as the server places them"""
_BATCH_TOKENS = 16_384
"""tokens that are computed at once"""


@dataclass(frozen=True, slots=True)
class ScoredItems:
    """Items with their scores."""

    items: tuple[str, ...]
    """source ids; recommended ones best first, candidates in their order"""
    scores: Mapping[str, NDArray[np.float32]]
    """by output of the model, a number an item; larger is better. Unknown candidates have the least number"""
    unknown: tuple[str, ...] = ()
    """ids that the model does not know: events were left out, candidates got the last place"""

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True, slots=True)
class _ResolvedRequest:
    part: BatchItem
    unknown: tuple[str, ...]
    """ids that the model does not know"""


class Recommender:
    """A model in memory. Nothing is kept between calls; any thread may call."""

    def __init__(self, servable: Servable, slide_events: int | None = None, data: Path | None = None):
        """slide_events: events by which a full history slides; none takes what the model was measured with, as a
        server does. data: folder of the dataset that the model was trained on, if it is known."""
        self.servable = servable
        self.data = data
        self._runner = plain_runner(servable, slide_events)
        self._form = self._runner.form

    @property
    def item_ids(self) -> tuple[str, ...]:
        """Source ids of all items that the model knows."""
        return self.servable.item_keys

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of a candidate's scores."""
        return self._form.outputs

    def recommend(
        self,
        history: History,
        k: int = 10,
        *,
        exclude_seen: bool = True,
        exclude: Items = (),
        allow: Items | None = None,
        context: Mapping[str, Any] | None = None,
    ) -> ScoredItems:
        """The k best items of the catalogue for a history, best first.

        exclude_seen: items of the history are not recommended. exclude: nor are these. allow: only these are. context:
        by name of a feature of an event, its value now, where the model reads it.
        """
        found = self.recommend_all(
            [history], k, exclude_seen=exclude_seen, exclude=exclude, allow=allow, context=context
        )
        return found[0]

    def recommend_all(
        self,
        histories: Sequence[History],
        k: int = 10,
        *,
        exclude_seen: bool = True,
        exclude: Items = (),
        allow: Items | None = None,
        context: Mapping[str, Any] | None = None,
    ) -> list[ScoredItems]:
        """The k best items for each of many histories, computed together."""
        if self.servable.index is None:
            raise UserError(
                "ranks candidates and has no catalogue to recommend from",
                option="model",
                value=self.servable.spec.name,
                remedy="load a retrieval model, or call rank",
            )
        if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
            raise UserError("must be a whole number from 1", option="k", value=k, remedy="such as k=10")
        barred = self._known(exclude, "exclude")
        allowed = None if allow is None else self._known(allow, "allow")
        none = np.zeros(0, np.int64)
        keys = self.servable.item_keys

        def wanted(asked: "ResolvedRequest", reader: "RequestResolver", request: "RankRequest") -> Candidates:
            excluded = np.union1d(asked.seen, barred) if exclude_seen else barred
            return Candidates(items=none, now_ms=asked.now_ms, num_best=int(k), excluded=excluded, allowed=allowed)

        asked = [self._asked(asked_request(history, (), context), wanted) for history in _many(histories, "histories")]
        return [
            ScoredItems(tuple(keys[i - 1] for i in found.items.tolist()), self._columns(found.scores), one.unknown)
            for one, found in zip(asked, self._computed(asked), strict=True)
        ]

    def rank(self, history: History, candidates: Items, *, context: Mapping[str, Any] | None = None) -> ScoredItems:
        """Scores of candidates for a history, in the order of the candidates.

        context: by name of a category of an event, its value for every candidate.
        """
        return self.rank_all([history], [candidates], context=context)[0]

    def rank_all(
        self, histories: Sequence[History], candidates: Sequence[Items], *, context: Mapping[str, Any] | None = None
    ) -> list[ScoredItems]:
        """Scores for each of many histories and its own list of candidates, computed together."""
        histories, candidates = _many(histories, "histories"), _many(candidates, "candidates")
        if len(candidates) != len(histories):
            raise UserError(
                f"must be lists for each of {len(histories)} histories",
                option="candidates",
                value=len(candidates),
                remedy="give as many lists as histories",
            )

        def wanted(asked: "ResolvedRequest", reader: "RequestResolver", request: "RankRequest") -> Candidates:
            ids = reader.items(request.candidates, "candidates")
            features = reader.candidate_features(request, len(request.candidates))
            return Candidates(items=ids, now_ms=asked.now_ms, features=features)

        requests = [asked_request(h, c, context) for h, c in zip(histories, candidates, strict=True)]
        asked = [self._asked(request, wanted) for request in requests]
        answers = []
        for request, one, found in zip(requests, asked, self._computed(asked), strict=True):
            is_known = found.items > 0
            keys = [str(key) for key in request.candidates]
            unknown = np.flatnonzero(~is_known).tolist()
            scores = np.where(is_known[:, None], found.scores, _LAST)
            answers.append(ScoredItems(tuple(keys), self._columns(scores), (*one.unknown, *(keys[i] for i in unknown))))
        return answers

    def item_vectors(self, items: Items | None = None) -> NDArray[np.float32]:
        """(items, D) vectors of these items, or of all in the order of `item_ids`.

        Of a retrieval model those whose products with its states are the scores; of a ranking model rows of its table.
        """
        named = self.item_ids if items is None else plain_ids(items, "items")
        ids = self.servable.ids_of(named) if items is not None else np.arange(1, len(named) + 1)
        if not ids.all():
            unknown = [named[i] for i in np.flatnonzero(ids == 0)[:10]]
            raise UserError("the model knows no such item", option="items", value=unknown, remedy="see item_ids")
        index = self.servable.index
        table, rows = (self.servable.tables["items"], ids) if index is None else (index, ids - 1)
        return table.rows(torch.from_numpy(rows)).float().cpu().numpy()

    def batch(self, cfg: "BatchJobConfig | None" = None, topology: "Topology | None" = None) -> "BatchRecommender":
        """For very many users: writes files part by part, goes on after a kill, and shares the work among ranks.

        `model.batch().recommend("all", Path("recs.parquet"), data=Path("data/mine"))`; the model of a run takes the
        users of its own dataset if `data` is not given.
        """
        from nestrec.inference.batch_inference import BatchRecommender

        return BatchRecommender(self.servable, cfg, topology, data=self.data)

    def __reduce__(self) -> Any:
        remedy = "call nestrec.load in each process"
        raise UserError("cannot be pickled or copied", option="model", value=self.servable.spec.name, remedy=remedy)

    def _known(self, items: Items, field: str) -> NDArray[np.int64]:
        ids = self.servable.ids_of(plain_ids(items, field))
        return np.unique(ids[ids > 0])

    def _asked(
        self, request: "RankRequest", wanted: "Callable[[ResolvedRequest, RequestResolver, RankRequest], Candidates]"
    ) -> "_ResolvedRequest":
        """A request as the server reads it."""
        from nestrec.serving.core.request_limits import BadRequestError
        from nestrec.serving.inputs.request_resolver import RequestNotes, RequestResolver, check_feature_names

        notes = RequestNotes()
        reader = RequestResolver(self.servable, NO_LIMITS, notes)
        try:
            check_feature_names(request, self.servable)
            asked = reader.user(request)
            candidates = wanted(asked, reader, request)
        except BadRequestError as error:
            raise explained(error, dataclasses.asdict(request)) from None
        tokens = self._form.tokens(asked.history, asked.now_ms)
        part = BatchItem(tokens=tokens, first=0, end=tokens.length, pages=[], store_until=0, candidates=candidates)
        return _ResolvedRequest(
            part, tuple(dict.fromkeys(str(key) for said in notes.said()["unknown"] for key in said["ids"]))
        )

    def _computed(self, asked: "list[_ResolvedRequest]") -> Iterator[BatchItemScores]:
        """In order, as many tokens at a time as fit together."""
        batch = list[BatchItem]()
        tokens = 0
        for one in asked:
            if batch and tokens + one.part.num_new > _BATCH_TOKENS:
                yield from self._run(batch)
                batch = []
                tokens = 0
            batch.append(one.part)
            tokens += one.part.num_new
        yield from self._run(batch)

    def _run(self, parts: list[BatchItem]) -> Iterator[BatchItemScores]:
        for found in self._runner.run(parts) if parts else ():
            assert found is not None
            yield found

    def _columns(self, scores: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        return {name: np.ascontiguousarray(scores[:, i]) for i, name in enumerate(self.outputs)}


def load(run: str | os.PathLike[str], *, best: bool = True, device: str = "cpu") -> Recommender:
    """The model of a run, of a folder that `nestrec export` wrote, or the newest at an address to which versions are
    published, ready to recommend.

    best: of a run the weights of the best validation score, else the last ones. Models of every sequence task can be
    loaded; those that the server cannot serve are computed in whole passes.
    """
    try:
        folder = Path(run)
    except TypeError as error:
        remedy = "give what nestrec.train gave, its folder, or one that `nestrec export` wrote"
        raise UserError("is neither a run nor an export", option="run", value=run, remedy=remedy) from error
    place = known_device(device)
    check_device(place)
    device = str(place)
    if (folder / MANIFEST_FILE).exists():
        return Recommender(Servable.load(folder, device))
    if (source := source_of(os.fspath(run))) is not None:
        return Recommender(open_source(source, device).servable)
    data = Path(RunFolder(folder).config().data.folder)  # raises for a folder that is neither
    from nestrec.exporters.servable_writer import servable_of_run

    servable = servable_of_run(folder, Path(tempfile.gettempdir()), best=best)
    return Recommender(servable if device == "cpu" else _moved(servable, device), data=data)


def _moved(servable: Servable, device: str) -> Servable:
    def moved(table: Any) -> DeviceTable:
        return DeviceTable(table.weight.to(device))

    return replace(
        servable,
        model=servable.model.to(device),
        index=None if servable.index is None else moved(servable.index),
        tables={name: moved(table) for name, table in servable.tables.items()},
        item_columns={name: column.to(device) for name, column in servable.item_columns.items()},
    )


def _many(given: Iterable[Any], field: str) -> list[Any]:
    """One history in the place of many would be read as many, by its fields or letters."""
    if isinstance(given, Mapping | str) or not isinstance(given, Iterable):
        one = "history" if field == "histories" else "list of candidates"
        problem = f"is one {one}" if isinstance(given, Mapping | str) else "is no list"
        remedy = f"give a list with a {one} for each, or call recommend or rank for one"
        raise UserError(problem, option=field, value=given, remedy=remedy)
    return list(given)
