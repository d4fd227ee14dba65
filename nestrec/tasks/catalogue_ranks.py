"""The rank of each user's held-out item: in the whole catalogue, among sampled items, and by baselines."""

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.bounds import Count, Natural
from nestrec.base.config import config
from nestrec.base.errors import UserError, did_you_mean
from nestrec.base.random import fold, fold_array
from nestrec.data.batches import MicroBatch
from nestrec.data.samples.retrieval import RetrievalQueries
from nestrec.embedding import EmbeddingEngine
from nestrec.jagged import Jagged
from nestrec.models.retrieval import RetrievalModel
from nestrec.pipeline.compute import on_device
from nestrec.tasks.baselines import Baseline
from nestrec.tasks.task import sequence_info, share_of_ranks, sum_over_ranks

Ranks = NDArray[np.int64]
"""1-based rank of each user's target, in the order of the queries' users; 0 beyond the largest k"""


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

    def __post_init__(self) -> None:
        measured = [f"{metric}@{k}" for k in self.ks for metric in ("hr", "ndcg", "mrr")]
        if self.headline not in measured:
            raise UserError(
                "is not among the metrics that are measured",
                field="task.evaluation.headline",
                value=self.headline,
                remedy=f"{did_you_mean(self.headline, measured)} task.evaluation.ks gives the cut-offs",
            )


class CatalogueRanks:
    """Ranks of one part's targets. Users are shared out over the ranks; every rank gets all results."""

    def __init__(
        self,
        model: RetrievalModel,
        engine: EmbeddingEngine,
        queries: RetrievalQueries,
        cfg: RetrievalEvaluationConfig,
        num_items: int,
    ):
        self._model, self._engine, self._queries, self._cfg = model, engine, queries, cfg
        self._num_items, self._k = num_items, max(cfg.ks)
        topology = engine.topology
        self._shares = share_of_ranks(queries.users, cfg.batch_users, topology.rank, topology.world)

    def of_model(self) -> Ranks:
        """In the whole catalogue, without the items that the config excludes."""
        parts = []
        for users in self._shares:
            batch = self._queries.assemble(users)
            _, keys = self._engine.top_k(
                "items",
                self._last_states(batch),
                self._k,
                exclude=self._excluded(batch),
                row_transform=lambda rows, keys: self._compared(rows),
                candidates=np.arange(1, self._num_items + 1),
            )
            hit = keys.cpu() == batch.tensors["target"][:, None]
            parts.append(np.where(hit.any(1), hit.int().argmax(1) + 1, 0).astype(np.int64))
        return self._merge(parts)

    def among_sampled(self) -> Ranks:
        """Among random items that the user has not had before the target (the protocol of the SASRec paper)."""
        parts = []
        for users in self._shares:
            batch = self._queries.assemble(users)
            candidates = self._sampled_candidates(users, batch)
            rows = self._engine.lookup_readonly({"positive": candidates})["positive"]
            vectors = self._compared(rows.flatten(0, 1)).unflatten(0, candidates.shape)
            scores = (vectors.double() @ self._last_states(batch).double()[:, :, None]).squeeze(2)
            parts.append((scores[:, 1:] >= scores[:, :1]).sum(1).cpu().numpy() + 1)
        return self._merge(parts)

    def of_baseline(self, baseline: Baseline) -> Ranks:
        """In the whole catalogue, by a system without a model; cheap, so every rank computes all of it."""
        ranks = []
        for start in range(0, len(self._queries.users), self._cfg.batch_users):
            batch = self._queries.assemble(self._queries.users[start : start + self._cfg.batch_users])
            history = Jagged(torch.from_numpy(batch.keys["history"]), batch.tensors["offsets"]).rows()
            excluded = self._excluded(batch)
            banned = [set(row.tolist()) for row in excluded.rows()] if excluded else [set[int]() for _ in history]
            for items, ban, target in zip(history, banned, batch.tensors["target"].tolist(), strict=True):
                best = baseline.top(int(items[-1]), ban, self._k)
                ranks.append(best.index(target) + 1 if target in best else 0)
        return np.array(ranks, dtype=np.int64)

    def num_barred_targets(self) -> int:
        """Users whose target cannot be found, since it is among the items that the config excludes."""
        num_barred = 0
        for start in range(0, len(self._queries.users), self._cfg.batch_users):
            batch = self._queries.assemble(self._queries.users[start : start + self._cfg.batch_users])
            if (excluded := self._excluded(batch)) is None:
                return 0
            row = excluded.row_of_value()
            num_barred += len(row[excluded.values == batch.tensors["target"][row]].unique())
        return num_barred

    def _last_states(self, batch: MicroBatch) -> torch.Tensor:
        """(B, D) the state of each user's last token."""
        rows = self._engine.lookup_readonly({"history": batch.keys["history"]})["history"]
        if batch.num_tokens == 0:
            return rows.new_zeros(0, self._model.dim)
        moved = on_device(batch, self._engine.device)
        self._model.eval()
        with torch.no_grad():
            states: torch.Tensor = self._model(self._model.item_rows(rows), sequence_info(moved))
        self._model.train()
        return states[moved.tensors["offsets"][1:] - 1]

    @torch.no_grad()
    def _compared(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the item table as scores meet them."""
        return self._model.item_vectors(self._model.item_rows(rows))  # type: ignore[arg-type]

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
                    field="task.evaluation.sampled_negatives",
                    value=count,
                    remedy="ask for fewer, or 0 to skip the sampled protocol",
                )
            order = np.argsort(fold_array(fold(0x5A, int(user)), allowed), kind="stable")
            out[i] = [target, *allowed[order[:count]]]
        return out

    def _merge(self, parts: list[Ranks]) -> Ranks:
        """Ranks of all users on every rank."""
        merged = np.zeros(len(self._queries.users), dtype=np.int64)
        if self._shares:
            merged[np.searchsorted(self._queries.users, np.concatenate(self._shares))] = np.concatenate(parts)
        return sum_over_ranks(self._engine.topology, merged)
