"""Python API for offline inference with a trained model: recommend items, rank candidates, read item embeddings.

    model = nestrec.load("runs/demo")                        # a run, or a folder that `nestrec export` wrote
    history = {"items": ["12", "7"], "times_ms": [1642271351894, 1642271387634]}
    model.recommend(history, k=5).items
    model.rank_batch([history, history], candidates=[["5", "9"], ["5"]])

Items are addressed by the ids of the source data. A history is a mapping with the fields of a server request (`items`,
`times_ms`, `actions`, `features`, `user_features`, `now_ms`), or a list of item ids, oldest first, if the model reads
nothing else. Results equal those of the server, because the same code reads histories and scores candidates.
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

from nestrec.base.cuda import parse_device
from nestrec.base.errors import UserError
from nestrec.distributed.topology import check_device
from nestrec.inference.request_parsing import NO_LIMITS, History, Items, parse_request, plain_ids, to_user_error
from nestrec.serving.engine.reference_runner import BatchItem, BatchItemScores, plain_runner
from nestrec.serving.model.request_inputs import Candidates
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import MANIFEST_FILE
from nestrec.serving.model.served_tables import DeviceTable
from nestrec.serving.versions.live_version import open_model, parse_model_address
from nestrec.training.run_folder import RunFolder

if TYPE_CHECKING:
    from nestrec.distributed import Topology
    from nestrec.inference.batch_inference import BatchJobConfig, BatchRecommender
    from nestrec.serving.inputs.request_resolver import RequestResolver, ResolvedRequest
    from nestrec.serving.inputs.request_schema import RankRequest


_UNKNOWN_SCORE = np.finfo(np.float32).min
"""Score of candidates that the model does not know, as in the server."""
_BATCH_TOKENS = 16_384
"""Maximum number of tokens per batch."""


@dataclass(frozen=True, slots=True)
class ScoredItems:
    """Items with their scores. `len()` returns the number of items."""

    items: tuple[str, ...]
    """Source ids of the items: recommendations best first, candidates in the order of the request."""
    scores: Mapping[str, NDArray[np.float32]]
    """Scores by output of the model, one per item; larger is better. Unknown candidates have the lowest float32."""
    unknown_ids: tuple[str, ...] = ()
    """Ids that the model does not know. Such events are skipped, and such candidates are ranked last."""

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True, slots=True)
class _ResolvedRequest:
    item: BatchItem
    unknown: tuple[str, ...]
    """Ids that the model does not know."""


class Recommender:
    """A trained model in memory that recommends items and ranks candidates. Thread-safe and stateless between calls.

    `nestrec.load` returns a recommender:

        model = nestrec.load("runs/demo")
        history = {"items": ["12", "7"], "times_ms": [1642271351894, 1642271387634]}
        best = model.recommend(history, k=5)
        print(best.items, best.scores["score"])

    Args:
        servable: The model.
        history_stride: Number of oldest events that are dropped at once when a history exceeds the maximum length of
            the model. None uses the value of the evaluation, as a server does.
        data: Folder of the dataset that the model was trained on, if known; the default dataset of `batch`.
    """

    def __init__(self, servable: Servable, history_stride: int | None = None, data: Path | None = None):
        self.servable = servable
        self.data = data
        self._runner = plain_runner(servable, history_stride)
        self._adapter = self._runner.adapter

    @property
    def item_ids(self) -> tuple[str, ...]:
        """Source ids of all items that the model knows."""
        return self.servable.item_keys

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the scores of an item, for example `("score",)` or the predicted actions."""
        return self._adapter.outputs

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
        """Return the k best items of the catalog for a history (retrieval models).

            model.recommend(["12", "7"], k=5, exclude=["3"]).items

        Args:
            history: Events of the user: a mapping with the fields of a server request, or item ids, oldest first.
            k: Maximum number of items.
            exclude_seen: Do not recommend items of the history.
            exclude: Ids of further items that are not recommended.
            allow: Ids of the only items that can be recommended; None allows the whole catalog.
            context: Values of the context features of the event to predict, by name.

        Returns:
            Up to k items with their scores, best first.

        Raises:
            UserError: The model is not a retrieval model, or the history lacks something that the model reads.
        """
        results = self.recommend_batch(
            [history], k, exclude_seen=exclude_seen, exclude=exclude, allow=allow, context=context
        )
        return results[0]

    def recommend_batch(
        self,
        histories: Sequence[History],
        k: int = 10,
        *,
        exclude_seen: bool = True,
        exclude: Items = (),
        allow: Items | None = None,
        context: Mapping[str, Any] | None = None,
    ) -> list[ScoredItems]:
        """Return the k best items for each of many histories, computed in batches.

        Args:
            histories: Histories of users.
            k: Maximum number of items per user.
            exclude_seen: Do not recommend items of a user's own history.
            exclude: Ids of further items that are not recommended to any user.
            allow: Ids of the only items that can be recommended; None allows the whole catalog.
            context: Values of the context features of the events to predict, by name, for all users.

        Returns:
            One result per history, in order.

        Raises:
            UserError: The model is not a retrieval model, or a history lacks something that the model reads.
        """
        if self.servable.index is None:
            raise UserError(
                "a ranking model scores candidates and cannot search the catalog",
                option="model",
                value=self.servable.spec.name,
                remedy="load a retrieval model, or call rank",
            )
        if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
            raise UserError("must be an integer from 1", option="k", value=k, remedy="pass, for example, k=10")
        excluded_ids = self._known_ids(exclude, "exclude")
        allowed = None if allow is None else self._known_ids(allow, "allow")
        none = np.zeros(0, np.int64)
        keys = self.servable.item_keys

        def make_candidates(
            resolved: "ResolvedRequest", resolver: "RequestResolver", request: "RankRequest"
        ) -> Candidates:
            excluded = np.union1d(resolved.seen, excluded_ids) if exclude_seen else excluded_ids
            return Candidates(items=none, now_ms=resolved.now_ms, num_best=int(k), excluded=excluded, allowed=allowed)

        requests = [
            self._resolve(parse_request(history, (), context), make_candidates)
            for history in _check_list(histories, "histories")
        ]
        return [
            ScoredItems(
                tuple(keys[i - 1] for i in result.items.tolist()),
                self._scores_by_output(result.scores),
                request.unknown,
            )
            for request, result in zip(requests, self._run_in_batches(requests), strict=True)
        ]

    def rank(self, history: History, candidates: Items, *, context: Mapping[str, Any] | None = None) -> ScoredItems:
        """Return the scores of candidates for a history.

            model.rank({"items": ["12", "7"]}, candidates=["5", "9"]).scores

        Args:
            history: Events of the user: a mapping with the fields of a server request, or item ids, oldest first.
            candidates: Item ids to score.
            context: Values of the context features by name, which apply to every candidate.

        Returns:
            The candidates in their given order, with their scores.

        Raises:
            UserError: The history lacks something that the model reads.
        """
        return self.rank_batch([history], [candidates], context=context)[0]

    def rank_batch(
        self, histories: Sequence[History], candidates: Sequence[Items], *, context: Mapping[str, Any] | None = None
    ) -> list[ScoredItems]:
        """Return the scores of candidates for each of many histories, computed in batches.

        Args:
            histories: Histories of users.
            candidates: One list of item ids per history.
            context: Values of the context features by name, which apply to every candidate.

        Returns:
            One result per history, in order.
        """
        histories, candidates = _check_list(histories, "histories"), _check_list(candidates, "candidates")
        if len(candidates) != len(histories):
            raise UserError(
                f"must contain one list for each of the {len(histories)} histories",
                option="candidates",
                value=len(candidates),
                remedy="pass as many lists as histories",
            )

        def make_candidates(
            resolved: "ResolvedRequest", resolver: "RequestResolver", request: "RankRequest"
        ) -> Candidates:
            ids = resolver.items(request.candidates, "candidates")
            features = resolver.candidate_features(request, len(request.candidates))
            return Candidates(items=ids, now_ms=resolved.now_ms, features=features)

        requests = [parse_request(h, c, context) for h, c in zip(histories, candidates, strict=True)]
        resolved = [self._resolve(request, make_candidates) for request in requests]
        results = []
        for request, one, batch_scores in zip(requests, resolved, self._run_in_batches(resolved), strict=True):
            is_known = batch_scores.items > 0
            keys = [str(key) for key in request.candidates]
            unknown = np.flatnonzero(~is_known).tolist()
            scores = np.where(is_known[:, None], batch_scores.scores, _UNKNOWN_SCORE)
            results.append(
                ScoredItems(tuple(keys), self._scores_by_output(scores), (*one.unknown, *(keys[i] for i in unknown)))
            )
        return results

    def item_vectors(self, items: Items | None = None) -> NDArray[np.float32]:
        """Return item embeddings.

        Args:
            items: Item ids; None returns all items in the order of `item_ids`.

        Returns:
            (items, D) float32 vectors. For a retrieval model these are the vectors of the index, whose inner products
            with a user's vector are the scores; for a ranking model they are rows of the item table.

        Raises:
            UserError: The model does not know an item.
        """
        named = self.item_ids if items is None else plain_ids(items, "items")
        ids = self.servable.ids_of(named) if items is not None else np.arange(1, len(named) + 1)
        if not ids.all():
            unknown = [named[i] for i in np.flatnonzero(ids == 0)[:10]]
            raise UserError(
                "the model does not know these items", option="items", value=unknown, remedy="use ids of model.item_ids"
            )
        index = self.servable.index
        table, rows = (self.servable.tables["items"], ids) if index is None else (index, ids - 1)
        return table.rows(torch.from_numpy(rows)).float().cpu().numpy()

    def batch(self, cfg: "BatchJobConfig | None" = None, topology: "Topology | None" = None) -> "BatchRecommender":
        """Return a batch inference job, which writes results for many users to files.

        A job resumes after a kill and can share its work among several ranks.

            model.batch().recommend("all", "recs.parquet", data="data/mine")

        Args:
            cfg: Options of the job.
            topology: Ranks that share the work; None uses this process only.

        Returns:
            The job. The dataset of its users is that of the run, unless a call passes `data`.
        """
        from nestrec.inference.batch_inference import BatchRecommender

        return BatchRecommender(self.servable, cfg, topology, data=self.data)

    def __reduce__(self) -> Any:
        remedy = "call nestrec.load in each process"
        raise UserError("cannot be pickled or copied", option="model", value=self.servable.spec.name, remedy=remedy)

    def _known_ids(self, items: Items, field: str) -> NDArray[np.int64]:
        ids = self.servable.ids_of(plain_ids(items, field))
        return np.unique(ids[ids > 0])

    def _resolve(
        self,
        request: "RankRequest",
        make_candidates: "Callable[[ResolvedRequest, RequestResolver, RankRequest], Candidates]",
    ) -> "_ResolvedRequest":
        """Resolve a request in the same way as the server."""
        from nestrec.serving.core.request_limits import BadRequestError
        from nestrec.serving.inputs.request_resolver import RequestNotes, RequestResolver, check_feature_names

        notes = RequestNotes()
        resolver = RequestResolver(self.servable, NO_LIMITS, notes)
        try:
            check_feature_names(request, self.servable)
            resolved = resolver.user(request)
            candidates = make_candidates(resolved, resolver, request)
        except BadRequestError as error:
            raise to_user_error(error, dataclasses.asdict(request)) from None
        tokens = self._adapter.tokens(resolved.history, resolved.now_ms)
        item = BatchItem(tokens=tokens, first=0, end=tokens.length, pages=[], store_until=0, candidates=candidates)
        return _ResolvedRequest(
            item, tuple(dict.fromkeys(str(key) for note in notes.to_response()["unknown_ids"] for key in note["ids"]))
        )

    def _run_in_batches(self, resolved: "list[_ResolvedRequest]") -> Iterator[BatchItemScores]:
        """Yield the results in order; each batch has as many requests as fit into `_BATCH_TOKENS`."""
        batch = list[BatchItem]()
        tokens = 0
        for request in resolved:
            if batch and tokens + request.item.num_new > _BATCH_TOKENS:
                yield from self._run(batch)
                batch = []
                tokens = 0
            batch.append(request.item)
            tokens += request.item.num_new
        yield from self._run(batch)

    def _run(self, items: list[BatchItem]) -> Iterator[BatchItemScores]:
        for result in self._runner.run(items) if items else ():
            assert result is not None
            yield result

    def _scores_by_output(self, scores: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        return {name: np.ascontiguousarray(scores[:, i]) for i, name in enumerate(self.outputs)}


def load(run: str | os.PathLike[str], *, best: bool = True, device: str = "cpu") -> Recommender:
    """Load a trained model for recommendations in Python.

    Models of every sequence task can be loaded. Models that the server cannot serve run full forward passes, without a
    KV cache.

    Args:
        run: Run folder, servable folder (written by `nestrec export`), or address of published versions, of which the
            newest one is loaded.
        best: Load the weights with the best validation score of a run instead of the last ones.
        device: PyTorch device of the model, for example `cpu` or `cuda:0`.

    Returns:
        The model, ready to recommend items or rank candidates.

    Raises:
        UserError: `run` is neither a run nor a servable, or the device is not available.

    Example:
        >>> model = nestrec.load("runs/demo", device="cuda")
        >>> model.recommend({"items": ["12", "7"], "times_ms": [1642271351894, 1642271387634]}, k=5).items
    """
    try:
        folder = Path(run)
    except TypeError as error:
        remedy = "pass the result of nestrec.train, its folder, or a folder that `nestrec export` wrote"
        raise UserError("must be a run or an exported folder", option="run", value=run, remedy=remedy) from error
    parsed_device = parse_device(device)
    check_device(parsed_device)
    device = str(parsed_device)
    if (folder / MANIFEST_FILE).exists():
        return Recommender(Servable.load(folder, device))
    if (source := parse_model_address(os.fspath(run))) is not None:
        return Recommender(open_model(source, device).servable)
    data = Path(RunFolder(folder).config().data.folder)  # raises UserError if the folder is not a run
    from nestrec.exporters.servable_writer import servable_from_run

    servable = servable_from_run(folder, Path(tempfile.gettempdir()), best=best)
    return Recommender(servable if device == "cpu" else _move_servable(servable, device), data=data)


def _move_servable(servable: Servable, device: str) -> Servable:
    def move_table(table: Any) -> DeviceTable:
        return DeviceTable(table.weight.to(device))

    return replace(
        servable,
        model=servable.model.to(device),
        index=None if servable.index is None else move_table(servable.index),
        tables={name: move_table(table) for name, table in servable.tables.items()},
        item_columns={name: column.to(device) for name, column in servable.item_columns.items()},
    )


def _check_list(values: Iterable[Any], field: str) -> list[Any]:
    """Check that an argument is a list: iterating a single mapping or string would yield its keys or letters."""
    if isinstance(values, Mapping | str) or not isinstance(values, Iterable):
        element = "history" if field == "histories" else "list of candidates"
        problem = f"must be a list, got one {element}" if isinstance(values, Mapping | str) else "must be a list"
        remedy = f"pass a list with one {element} per user, or call recommend or rank for a single user"
        raise UserError(problem, option=field, value=values, remedy=remedy)
    return list(values)
