"""The rank of each held-out item: in the whole catalogue, among sampled items, and by baselines.

The rank of every event of a window in the whole catalogue: one pass of the model over a slice asks for all of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.base.config_values import Count, Natural
from nestrec.base.errors import UserError, did_you_mean
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
from nestrec.tasks.task import share_of_ranks, sum_over_ranks

Ranks = NDArray[np.int64]
"""1-based rank of each query's target, in the order of the queries; 0 beyond the largest k"""
BaselineName = Literal["popularity", "recent popularity", "last item", "item knn", "ease"]
BASELINES: tuple[BaselineName, ...] = get_args(BaselineName)


@dataclass(frozen=True, slots=True)
class SystemRanks:
    """What a system made of all queries."""

    rank: Ranks
    exposed: ExposureCounts
    """how often it showed each item among its best"""


@config
class RetrievalEvaluationConfig:
    ks: tuple[Count, ...] = (10, 50, 200)
    """cut-offs of HR, NDCG and MRR"""
    headline: str = "ndcg@10"
    """metric that chooses the best epoch"""
    filter_seen: Literal["none", "input", "history"] = "input"
    """items that cannot be recommended: none, those of the model's input, or all before the target"""
    sampled_negatives: Natural = 0
    """also rank the target among so many random unseen items (100 in the SASRec paper); 0 skips this"""
    batch_users: Count = 512
    """users scored at a time"""
    max_targets: Count = 20
    """where a split holds out several events of a user, so many of the first are asked for, each after those before"""
    baselines: tuple[BaselineName, ...] = BASELINES
    """systems without a model that are measured beside it"""
    ease_max_items: Count = 8192
    """a larger catalogue is not given to `ease`, which needs memory for all pairs of items; four times that on a GPU"""
    slices: tuple[str, ...] = ("items", "users", "history")
    """parts of the queries that are measured apart: by how often the target was trained on, by whether the user was, by
    the length of the history, or by a category by its column, such as item_brand"""

    def __post_init__(self) -> None:
        measured = [f"{metric}@{k}" for k in self.ks for metric in ("hr", "ndcg", "mrr")]
        if self.headline not in measured:
            raise UserError(
                "is not among the metrics that are measured",
                option="task.evaluation.headline",
                value=self.headline,
                remedy=f"{did_you_mean(self.headline, measured)} task.evaluation.ks gives the cut-offs",
            )


class CatalogRanker:
    """Ranks of one part's targets. Users are shared out over the ranks; every rank gets all results."""

    def __init__(
        self,
        side: ItemTower,
        engine: EmbeddingEngine,
        queries: RetrievalQueries,
        cfg: RetrievalEvaluationConfig,
    ):
        self._side = side
        self._engine = engine
        self._queries = queries
        self._cfg = cfg
        self._num_items = side.num_items
        self._k = max(cfg.ks)
        self._shown = min(cfg.ks)
        topology = engine.topology
        self._shares = share_of_ranks(queries.ids, cfg.batch_users, topology.rank, topology.world)

    def of_model(self) -> SystemRanks:
        """In the whole catalogue, without the items that the config excludes."""
        parts = []
        exposed = np.zeros(self._num_items + 1, np.int64)
        compared = self._side.compared(self._engine)
        for users in self._shares:
            batch = self._queries.assemble(users)
            _, keys = self._engine.top_k(
                "items",
                self._last_states(batch),
                self._k,
                exclude=self._excluded(batch),
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

    def among_sampled(self) -> Ranks:
        """Among random items that the user has not had before the target (the protocol of the SASRec paper)."""
        parts = []
        for users in self._shares:
            batch = self._queries.assemble(users)
            candidates = self._sampled_candidates(self._queries.users[users], batch)
            content = self._side.content(self._engine, candidates.reshape(-1))
            vectors = self._side.scored(content).unflatten(0, candidates.shape)
            scores = (vectors.double() @ self._last_states(batch).double()[:, :, None]).squeeze(2)
            parts.append((scores[:, 1:] >= scores[:, :1]).sum(1).cpu().numpy() + 1)
        return self._merge(parts)

    def of_baseline(self, baseline: Baseline) -> SystemRanks:
        """In the whole catalogue, by a system without a model. Not collective: the caller shares the result."""
        ranks = []
        exposed = np.zeros(self._num_items + 1, np.int64)
        for batch in self._all_batches():
            history = Jagged(torch.from_numpy(batch.keys["history"]), batch.tensors["offsets"]).rows()
            excluded = self._excluded(batch)
            banned = [set(row.tolist()) for row in excluded.rows()] if excluded else [set[int]() for _ in history]
            for items, ban, target in zip(history, banned, batch.tensors["target"].tolist(), strict=True):
                best = baseline.top(items.numpy(), ban, self._k)
                ranks.append(best.index(target) + 1 if target in best else 0)
                exposed[best[: self._shown]] += 1
        return SystemRanks(np.array(ranks, dtype=np.int64), ExposureCounts(exposed, self._shown))

    def targets(self) -> NDArray[np.int64]:
        """Item id of each query."""
        found = [batch.tensors["target"].numpy() for batch in self._all_batches()]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def num_barred_targets(self) -> int:
        """Queries whose target cannot be found, since it is among the items that the config excludes."""
        num_barred = 0
        for batch in self._all_batches():
            if (excluded := self._excluded(batch)) is None:
                return 0
            row = excluded.row_of_value()
            num_barred += len(row[excluded.values == batch.tensors["target"][row]].unique())
        return num_barred

    def _all_batches(self) -> Iterator[MicroBatch]:
        ids = self._queries.ids
        size = self._cfg.batch_users
        for start in range(0, len(ids), size):
            yield self._queries.assemble(ids[start : start + size])

    def _last_states(self, batch: MicroBatch) -> torch.Tensor:
        """(B, D) the state of each user's last token."""
        states = self._side.states(self._engine, batch)
        return states[batch.tensors["offsets"][1:].to(states.device) - 1] if batch.num_tokens else states

    def _excluded(self, batch: MicroBatch) -> Jagged | None:
        if self._cfg.filter_seen == "none":
            return None
        if self._cfg.filter_seen == "input":
            return Jagged(torch.from_numpy(batch.keys["history"]), batch.tensors["offsets"])
        return Jagged(batch.tensors["seen"], batch.tensors["seen_offsets"])

    def _sampled_candidates(self, users: NDArray[np.int64], batch: MicroBatch) -> NDArray[np.int64]:
        """(B, 1 + negatives) item ids, the target first; negatives are drawn by the user's key, without repeats."""
        count = self._cfg.sampled_negatives
        out = np.empty((len(users), count + 1), dtype=np.int64)
        seen = Jagged(batch.tensors["seen"], batch.tensors["seen_offsets"]).rows()
        catalogue = np.arange(1, self._num_items + 1)
        for i, user in enumerate(users):
            target = int(batch.tensors["target"][i])
            allowed = np.setdiff1d(catalogue, np.append(seen[i].numpy(), target), assume_unique=False)
            if len(allowed) < count:
                raise UserError(
                    f"user {user} has only {len(allowed)} unseen items",
                    option="task.evaluation.sampled_negatives",
                    value=count,
                    remedy="ask for fewer, or 0 to skip the sampled protocol",
                )
            order = np.argsort(fold_array(fold(0x5A, int(user)), allowed), kind="stable")
            out[i] = [target, *allowed[order[:count]]]
        return out

    def _merge(self, parts: list[Ranks]) -> Ranks:
        """Ranks of all queries on every rank."""
        merged = np.zeros(len(self._queries.users), dtype=np.int64)
        if self._shares:
            merged[np.concatenate(self._shares)] = np.concatenate(parts)
        return sum_over_ranks(self._engine.topology, merged)


def ranks_of_slices(
    side: ItemTower, engine: EmbeddingEngine, slices: RetrievalChunkCollator, cfg: RetrievalEvaluationConfig
) -> NDArray[np.int64]:
    """1-based rank of each scored event, in the order of the slices; 0 beyond the largest k. Collective."""
    num_scored = slices.weights.astype(np.int64)
    place_of = np.concatenate([[0], np.cumsum(num_scored)])
    ranks = np.zeros(int(place_of[-1]), np.int64)
    batch_slices = max(1, cfg.batch_users // max(1, int(num_scored.mean() if len(num_scored) else 1)))
    topology = engine.topology
    compared = side.compared(engine)
    for chosen in share_of_ranks(np.arange(len(num_scored)), batch_slices, topology.rank, topology.world):
        rows = slices.read(chosen)
        batch, _ = slices.queries(chosen, rows)
        states = side.states(engine, batch)[batch.tensors["scored"].to(engine.device)]
        barred = cfg.filter_seen != "none"
        _, keys = engine.top_k(
            "items",
            states,
            max(cfg.ks),
            exclude=slices.before_targets(chosen, rows, of_input=cfg.filter_seen == "input") if barred else None,
            row_transform=compared,
            candidates=np.arange(1, side.num_items + 1),
            needs_rows=False,
        )
        hit = keys.cpu() == batch.tensors["target"][:, None]
        place = np.concatenate([np.arange(place_of[c], place_of[c + 1]) for c in chosen] or [ranks[:0]])
        ranks[place] = np.where(hit.any(1), hit.int().argmax(1) + 1, 0)
    return sum_over_ranks(topology, ranks)
