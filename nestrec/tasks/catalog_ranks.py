"""Ranks of the held-out items: in the full catalog, among sampled items, and by the baselines.

`CatalogRanker` ranks the targets of a data split. `rank_chunks` ranks every event of a time window with one forward
pass per chunk of events, because each token of a chunk is the query of the event that follows it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.base.config_values import Count, Natural
from nestrec.base.errors import UserError, did_you_mean, with_period
from nestrec.base.random import fold, fold_array
from nestrec.data.batch_loader import MicroBatch
from nestrec.data.flat_arrays import add_counts
from nestrec.data.samples.chunk_collator import RetrievalChunkCollator
from nestrec.data.samples.retrieval_collator import RetrievalQueries
from nestrec.embedding import EmbeddingEngine
from nestrec.jagged import Jagged
from nestrec.tasks.baselines import Baseline
from nestrec.tasks.item_tower import ItemTower
from nestrec.tasks.metrics import ExposureCounts
from nestrec.tasks.task import batches_of_rank, sum_over_ranks

Ranks = NDArray[np.int64]
"""1-based rank of each query's target, in the order of the queries; 0 if it is not among the largest k."""
BaselineName = Literal["popularity", "recent popularity", "last item", "item knn", "ease"]
BASELINES: tuple[BaselineName, ...] = get_args(BaselineName)


@dataclass(frozen=True, slots=True)
class SystemRanks:
    """Ranks and exposure counts of one system (the model or a baseline) over all queries."""

    rank: Ranks
    exposure: ExposureCounts
    """How often the system recommended each item in its top k."""


@config
class RetrievalEvaluationConfig:
    ks: tuple[Count, ...] = (10, 50, 200)
    """Cutoffs k of HR@k, NDCG@k and MRR@k."""
    main_metric: str = "ndcg@10"
    """Metric that selects the best epoch, for example `ndcg@10`."""
    filter_seen: Literal["none", "input", "history"] = "input"
    """Items that are excluded from recommendation: none, the items of the model input, or all items before the
    target (the full history)."""
    num_sampled_negatives: Natural = 0
    """Number of random unseen items among which the target is also ranked (100 in the SASRec paper); 0 disables it."""
    batch_size: Count = 512
    """Number of users scored per batch."""
    max_targets_per_user: Count = 20
    """Maximum number of targets per user: the first held-out events, each predicted from the events before it."""
    baselines: tuple[BaselineName, ...] = BASELINES
    """Non-neural baselines that are evaluated next to the model."""
    ease_max_items: Count = 8192
    """Maximum catalog size of the baseline `ease`, whose memory grows with the square of the number of items; the
    limit is four times as high on a GPU."""
    slices: tuple[str, ...] = ("items", "users", "history")
    """Slices of the queries with metrics of their own: `items` (by training events of the target), `users` (by
    whether the user was trained on), `history` (by its length), or the column of a category, such as item_brand."""

    def __post_init__(self) -> None:
        measured = [f"{metric}@{k}" for k in self.ks for metric in ("hr", "ndcg", "mrr")]
        if self.main_metric not in measured:
            raise UserError(
                "this metric is not computed",
                option="task.evaluation.main_metric",
                value=self.main_metric,
                remedy=f"{with_period(did_you_mean(self.main_metric, measured))} "
                "The option task.evaluation.ks sets the cutoffs",
            )


class CatalogRanker:
    """Ranks the targets of one data split. Users are distributed over the ranks; every rank gets all results."""

    def __init__(
        self,
        item_tower: ItemTower,
        engine: EmbeddingEngine,
        queries: RetrievalQueries,
        cfg: RetrievalEvaluationConfig,
    ):
        self._item_tower = item_tower
        self._engine = engine
        self._queries = queries
        self._cfg = cfg
        self._num_items = item_tower.num_items
        self._k = max(cfg.ks)
        self._shown = min(cfg.ks)
        topology = engine.topology
        self._shares = batches_of_rank(queries.ids, cfg.batch_size, topology.rank, topology.world)

    def rank_by_model(self) -> SystemRanks:
        """Rank the targets in the full catalog without the items that `filter_seen` excludes. Collective."""
        parts = []
        exposed = np.zeros(self._num_items + 1, np.int64)
        compared = self._item_tower.row_transform(self._engine)
        for users in self._shares:
            batch = self._queries.collate(users)
            _, keys = self._engine.top_k(
                "items",
                self._last_states(batch),
                self._k,
                exclude=self._excluded_items(batch),
                row_transform=compared,
                candidates=np.arange(1, self._num_items + 1),
                needs_rows=False,
            )
            best = keys.cpu()
            hit = best == batch.tensors["target"][:, None]
            parts.append(np.where(hit.any(1), hit.int().argmax(1) + 1, 0).astype(np.int64))
            shown = best[:, : self._shown].numpy().ravel()
            add_counts(shown[shown > 0], exposed)
        return SystemRanks(
            self._merge(parts), ExposureCounts(sum_over_ranks(self._engine.topology, exposed), self._shown)
        )

    def rank_among_sampled(self) -> Ranks:
        """Rank the targets among random items that are not in the user's history (the protocol of the SASRec paper).

        Collective.
        """
        parts = []
        for users in self._shares:
            batch = self._queries.collate(users)
            candidates = self._sampled_candidates(self._queries.users[users], batch)
            content = self._item_tower.item_inputs(self._engine, candidates.reshape(-1))
            vectors = self._item_tower.candidate_vectors(content).unflatten(0, candidates.shape)
            scores = (vectors.double() @ self._last_states(batch).double()[:, :, None]).squeeze(2)
            parts.append((scores[:, 1:] >= scores[:, :1]).sum(1).cpu().numpy() + 1)
        return self._merge(parts)

    def rank_by_baseline(self, baseline: Baseline) -> SystemRanks:
        """Rank the targets in the full catalog by a baseline. Not collective: the caller distributes the result."""
        ranks = []
        exposed = np.zeros(self._num_items + 1, np.int64)
        for batch in self._all_batches():
            history = Jagged(torch.from_numpy(batch.keys["history"]), batch.tensors["offsets"]).rows()
            excluded = self._excluded_items(batch)
            banned = [set(row.tolist()) for row in excluded.rows()] if excluded else [set[int]() for _ in history]
            for items, ban, target in zip(history, banned, batch.tensors["target"].tolist(), strict=True):
                best = baseline.top(items.numpy(), ban, self._k)
                ranks.append(best.index(target) + 1 if target in best else 0)
                exposed[best[: self._shown]] += 1
        return SystemRanks(np.array(ranks, dtype=np.int64), ExposureCounts(exposed, self._shown))

    def targets(self) -> NDArray[np.int64]:
        """Return the target item id of each query."""
        targets = [batch.tensors["target"].numpy() for batch in self._all_batches()]
        return np.concatenate(targets) if targets else np.zeros(0, np.int64)

    def num_excluded_targets(self) -> int:
        """Count the queries whose target cannot be recommended because `filter_seen` excludes it."""
        num_excluded = 0
        for batch in self._all_batches():
            if (excluded := self._excluded_items(batch)) is None:
                return 0
            row = excluded.row_of_value()
            num_excluded += len(row[excluded.values == batch.tensors["target"][row]].unique())
        return num_excluded

    def _all_batches(self) -> Iterator[MicroBatch]:
        ids = self._queries.ids
        size = self._cfg.batch_size
        for start in range(0, len(ids), size):
            yield self._queries.collate(ids[start : start + size])

    def _last_states(self, batch: MicroBatch) -> torch.Tensor:
        """Return the (B, D) state of each user's last token."""
        states = self._item_tower.states(self._engine, batch)
        return states[batch.tensors["offsets"][1:].to(states.device) - 1] if batch.num_tokens else states

    def _excluded_items(self, batch: MicroBatch) -> Jagged | None:
        if self._cfg.filter_seen == "none":
            return None
        if self._cfg.filter_seen == "input":
            return Jagged(torch.from_numpy(batch.keys["history"]), batch.tensors["offsets"])
        return Jagged(batch.tensors["seen"], batch.tensors["seen_offsets"])

    def _sampled_candidates(self, users: NDArray[np.int64], batch: MicroBatch) -> NDArray[np.int64]:
        """Return (B, 1 + negatives) item ids: the target, and distinct negatives that are a function of the user."""
        count = self._cfg.num_sampled_negatives
        out = np.empty((len(users), count + 1), dtype=np.int64)
        seen = Jagged(batch.tensors["seen"], batch.tensors["seen_offsets"]).rows()
        catalog = np.arange(1, self._num_items + 1)
        for i, user in enumerate(users):
            target = int(batch.tensors["target"][i])
            allowed = np.setdiff1d(catalog, np.append(seen[i].numpy(), target), assume_unique=False)
            if len(allowed) < count:
                raise UserError(
                    f"user {user} has only {len(allowed)} unseen items",
                    option="task.evaluation.num_sampled_negatives",
                    value=count,
                    remedy="use a smaller number, or 0 to disable the sampled protocol",
                )
            order = np.argsort(fold_array(fold(0x5A, int(user)), allowed), kind="stable")
            out[i] = [target, *allowed[order[:count]]]
        return out

    def _merge(self, parts: list[Ranks]) -> Ranks:
        """Return the ranks of all queries on every process."""
        merged = np.zeros(len(self._queries.users), dtype=np.int64)
        if self._shares:
            merged[np.concatenate(self._shares)] = np.concatenate(parts)
        return sum_over_ranks(self._engine.topology, merged)


def rank_chunks(
    item_tower: ItemTower, engine: EmbeddingEngine, chunks: RetrievalChunkCollator, cfg: RetrievalEvaluationConfig
) -> NDArray[np.int64]:
    """Return the 1-based rank of each scored event, in the order of the chunks; 0 if it is not among the largest k.

    Collective.
    """
    num_scored = chunks.weights.astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(num_scored)])
    ranks = np.zeros(int(offsets[-1]), np.int64)
    chunks_per_batch = max(1, cfg.batch_size // max(1, int(num_scored.mean() if len(num_scored) else 1)))
    topology = engine.topology
    compared = item_tower.row_transform(engine)
    for chosen in batches_of_rank(np.arange(len(num_scored)), chunks_per_batch, topology.rank, topology.world):
        rows = chunks.read(chosen)
        batch, _ = chunks.collate_queries(chosen, rows)
        states = item_tower.states(engine, batch)[batch.tensors["scored"].to(engine.device)]
        filters_seen = cfg.filter_seen != "none"
        _, keys = engine.top_k(
            "items",
            states,
            max(cfg.ks),
            exclude=chunks.items_before_targets(chosen, rows, of_input=cfg.filter_seen == "input")
            if filters_seen
            else None,
            row_transform=compared,
            candidates=np.arange(1, item_tower.num_items + 1),
            needs_rows=False,
        )
        hit = keys.cpu() == batch.tensors["target"][:, None]
        index = np.concatenate([np.arange(offsets[c], offsets[c + 1]) for c in chosen] or [ranks[:0]])
        ranks[index] = np.where(hit.any(1), hit.int().argmax(1) + 1, 0)
    return sum_over_ranks(topology, ranks)
