"""Next-item retrieval: trained on every position, measured by ranking the whole catalogue."""

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.base.errors import UserError
from nestrec.base.random import fold, fold_array
from nestrec.data.batches import MicroBatch
from nestrec.data.dataset import Dataset
from nestrec.data.retrieval import HistoryConfig, RetrievalAssembler, RetrievalQueries
from nestrec.data.split import Part, leave_one_out
from nestrec.data.windows import window_index
from nestrec.embedding import EmbeddingEngine, InitConfig, RowOptimizerConfig, StoreConfig, TableConfig
from nestrec.jagged import Jagged
from nestrec.models.hstu import HSTUConfig
from nestrec.models.retrieval import EncoderConfig, RetrievalModel, SimilarityConfig
from nestrec.ops.gather_rows import gather_rows
from nestrec.ops.softmax_losses import bce, full_cross_entropy, sampled_logits, sampled_softmax
from nestrec.training.baselines import Baseline, LastItem, Popularity
from nestrec.training.metrics import bootstrap, ranking_metrics
from nestrec.training.tasks.task import Evaluation, Task, on_device, sequence_info, share_of_ranks, sum_over_ranks


@config
class RetrievalEvaluationConfig:
    ks: tuple[int, ...] = (10, 50, 200)
    """cut-offs of HR, NDCG and MRR"""
    headline: str = "ndcg@10"
    """metric that chooses the best epoch"""
    filter_seen: Literal["none", "input", "history"] = "input"
    """items that cannot be recommended: none, those of the model's input, or all before the target"""
    sampled_negatives: int = 0
    """also rank the target among so many random unseen items (100 in the SASRec paper); 0 skips this"""
    batch_users: int = 512
    """users scored at a time"""


@config
class RetrievalTaskConfig:
    kind: Literal["retrieval"] = "retrieval"
    """next-item retrieval"""
    encoder: EncoderConfig = HSTUConfig()
    """the backbone"""
    similarity: SimilarityConfig = SimilarityConfig()
    """how states and items meet"""
    history: HistoryConfig = HistoryConfig()
    """what of a user's history the model sees"""
    loss: Literal["sampled_softmax", "full", "bce"] = "sampled_softmax"
    """over sampled negatives, the whole catalogue, or pairs"""
    num_negatives: int = 128
    """uniform negatives of a token, with replacement"""
    item_init: InitConfig = InitConfig(scale=0.02)
    """first values of item vectors"""
    item_optimizer: RowOptimizerConfig = RowOptimizerConfig(kind="adam", beta2=0.98)
    """row optimiser of the item table"""
    item_store: StoreConfig = StoreConfig()
    """where the item table lives"""
    evaluation: RetrievalEvaluationConfig = RetrievalEvaluationConfig()
    """how the model is measured"""


class RetrievalTask(Task):
    def __init__(self, cfg: RetrievalTaskConfig, dataset: Dataset, *, seed: int, dtype: Literal["float32", "float64"]):
        self.cfg, self._dataset = cfg, dataset
        self._use_times = isinstance(cfg.encoder, HSTUConfig) and cfg.encoder.time_bias
        _check(cfg, dataset, self._use_times)
        self._split = leave_one_out(dataset.lengths)
        self._baselines: dict[Part, dict[str, NDArray[np.int64]]] = {}
        self.model = RetrievalModel(cfg.encoder, cfg.similarity)
        features = ("history", "positive", "negative") if cfg.loss != "full" else ("history", "positive", "catalogue")
        self.tables = (
            TableConfig(
                name="items", dim=cfg.encoder.dim, num_rows=dataset.card.num_item_rows, features=features, dtype=dtype,
                seed=seed, init=cfg.item_init, optimizer=cfg.item_optimizer, store=cfg.item_store,
            ),
        )  # fmt: skip
        self.assembler = RetrievalAssembler(
            dataset, self._split, cfg.history, seed=seed, use_times=self._use_times,
            num_negatives=0 if cfg.loss == "full" else cfg.num_negatives, whole_catalogue=cfg.loss == "full",
        )  # fmt: skip

    def loss(
        self, batch: MicroBatch, rows: Mapping[str, torch.Tensor], index: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        row_UD = rows["items"]
        query_TD = self.model(gather_rows(row_UD, index["history"]), sequence_info(batch))
        if self.cfg.loss == "full":
            catalogue_ND = self._item_vectors(gather_rows(row_UD, index["catalogue"]))
            return full_cross_entropy(query_TD, catalogue_ND, batch.tensors["target"] - 1).sum()
        candidate_UD = self._item_vectors(row_UD)
        positive, negative = sampled_logits(query_TD, candidate_UD, index["positive"], index["negative"])
        return (
            sampled_softmax(positive, negative) if self.cfg.loss == "sampled_softmax" else bce(positive, negative)
        ).sum()

    def evaluate(self, engine: EmbeddingEngine, part: Part) -> Evaluation:
        queries = RetrievalQueries(self._dataset, self._split, self.cfg.history, part, use_times=self._use_times)
        if part not in self._baselines:
            self._baselines[part] = self._baseline_ranks(queries)
        rank = {"model": self._ranks(engine, queries), **self._baselines[part]}
        if self.cfg.evaluation.sampled_negatives:
            rank["model, sampled"] = self._sampled_ranks(engine, queries)
        # A validation is one of many and only its mean decides; the test is the figure that people quote.
        num_draws = 1000 if part == "test" else 100
        metrics = {
            system: bootstrap(ranking_metrics(r, self.cfg.evaluation.ks), num_draws=num_draws)
            for system, r in rank.items()
        }
        details = {"users": queries.users, **{f"rank/{system}": r for system, r in rank.items()}}
        return Evaluation(part, self.cfg.evaluation.headline, metrics, details)

    def _ranks(self, engine: EmbeddingEngine, queries: RetrievalQueries) -> NDArray[np.int64]:
        """1-based rank of each user's target in the whole catalogue, 0 beyond the largest k."""
        k = max(self.cfg.evaluation.ks)
        parts = []
        for users in self._shares(engine, queries):
            batch = queries.assemble(users)
            query_BD = self._last_states(engine, batch)
            _, keys = engine.top_k(
                "items", query_BD, k, exclude=self._excluded(batch), row_transform=self._item_vectors,
                candidates=np.arange(1, self._dataset.card.counts.items + 1),
            )  # fmt: skip
            hit = keys.cpu() == batch.tensors["target"][:, None]
            parts.append(np.where(hit.any(1), hit.int().argmax(1) + 1, 0).astype(np.int64))
        return self._merge(engine, queries, parts)

    def _item_vectors(self, row_UD: torch.Tensor, keys: torch.Tensor | None = None) -> torch.Tensor:
        vectors: torch.Tensor = self.model.item_vectors(row_UD)  # type: ignore[operator]
        return vectors

    def _sampled_ranks(self, engine: EmbeddingEngine, queries: RetrievalQueries) -> NDArray[np.int64]:
        """Rank of the target among random items that the user has not had before it."""
        parts = []
        for users in self._shares(engine, queries):
            batch = queries.assemble(users)
            candidates = self._sampled_candidates(users, batch)
            vectors = self.model.item_vectors(
                engine.lookup_readonly({"positive": candidates})["positive"].flatten(0, 1)
            )  # type: ignore[operator]
            query_BD = self._last_states(engine, batch)
            scores = (vectors.view(*candidates.shape, -1).double() @ query_BD.double()[:, :, None]).squeeze(2)
            parts.append((scores[:, 1:] >= scores[:, :1]).sum(1).cpu().numpy() + 1)
        return self._merge(engine, queries, parts)

    def _sampled_candidates(self, users: NDArray[np.int64], batch: MicroBatch) -> NDArray[np.int64]:
        """(B, 1 + negatives) item ids, the target first; negatives are drawn by the user's key until unseen."""
        count, num_items = self.cfg.evaluation.sampled_negatives, self._dataset.card.counts.items
        out = np.empty((len(users), count + 1), dtype=np.int64)
        seen = Jagged(batch.tensors["seen"], batch.tensors["seen_offsets"]).rows()
        for i, user in enumerate(users):
            target = int(batch.tensors["target"][i])
            draws = fold_array(fold(0x5A, int(user)), np.arange(8 * count + 64)) % np.uint64(num_items) + np.uint64(1)
            fresh = [int(d) for d in dict.fromkeys(draws.tolist()) if d != target and d not in set(seen[i].tolist())]
            out[i] = [target, *fresh[:count]]
        return out

    def _last_states(self, engine: EmbeddingEngine, batch: MicroBatch) -> torch.Tensor:
        """(B, D) the state of each user's last token."""
        history = engine.lookup_readonly({"history": batch.keys["history"]})["history"]
        if batch.num_tokens == 0:
            return history.new_zeros(0, history.shape[-1])
        moved = on_device(batch, engine.device)
        self.model.eval()
        with torch.no_grad():
            states: torch.Tensor = self.model(history, sequence_info(moved))
        self.model.train()
        return states[moved.tensors["offsets"][1:] - 1]

    def _excluded(self, batch: MicroBatch) -> Jagged | None:
        tensors = batch.tensors
        if self.cfg.evaluation.filter_seen == "none":
            return None
        if self.cfg.evaluation.filter_seen == "input":
            return Jagged(torch.from_numpy(batch.keys["history"]), tensors["offsets"])
        return Jagged(tensors["seen"], tensors["seen_offsets"])

    def _baseline_ranks(self, queries: RetrievalQueries) -> dict[str, NDArray[np.int64]]:
        rows = self._dataset.rows(np.arange(self._dataset.num_samples))
        items, offsets = rows.lists["item_ids"]
        index, train_offsets = window_index(offsets[:-1], offsets[:-1] + self._split.train_end)
        popularity = Popularity(items[index], self._dataset.card.counts.items)
        systems: dict[str, Baseline] = {
            "popularity": popularity,
            "last item": LastItem(items[index], train_offsets, popularity),
        }
        k = max(self.cfg.evaluation.ks)
        ranks = {name: np.zeros(len(queries.users), dtype=np.int64) for name in systems}
        for start in range(0, len(queries.users), self.cfg.evaluation.batch_users):
            batch = queries.assemble(queries.users[start : start + self.cfg.evaluation.batch_users])
            excluded = self._excluded(batch)
            history = Jagged(torch.from_numpy(batch.keys["history"]), batch.tensors["offsets"]).rows()
            banned = [set(r.tolist()) for r in excluded.rows()] if excluded else [set() for _ in history]
            for i, target in enumerate(batch.tensors["target"].tolist()):
                for name, system in systems.items():
                    best = system.top(int(history[i][-1]), banned[i], k)
                    ranks[name][start + i] = best.index(target) + 1 if target in best else 0
        return ranks

    def _shares(self, engine: EmbeddingEngine, queries: RetrievalQueries) -> list[NDArray[np.int64]]:
        topology = engine.topology
        return share_of_ranks(queries.users, self.cfg.evaluation.batch_users, topology.rank, topology.world)

    def _merge(
        self, engine: EmbeddingEngine, queries: RetrievalQueries, parts: list[NDArray[np.int64]]
    ) -> NDArray[np.int64]:
        """Ranks of all users on every rank, in the order of `queries.users`."""
        merged = np.zeros(len(queries.users), dtype=np.int64)
        place = {int(u): i for i, u in enumerate(queries.users)}
        mine = [place[int(u)] for users in self._shares(engine, queries) for u in users]
        merged[mine] = np.concatenate(parts) if parts else []
        return sum_over_ranks(engine.topology, merged)


def _check(cfg: RetrievalTaskConfig, dataset: Dataset, use_times: bool) -> None:
    if use_times and not dataset.card.has_timestamps:
        raise UserError(
            "needs timestamps, and the dataset has none", field="task.encoder.time_bias", value=True,
            remedy="set task.encoder.time_bias=false, or prepare the data from files with timestamps",
        )  # fmt: skip
    if cfg.history.max_length != cfg.encoder.max_length:
        raise UserError(
            f"differs from task.encoder.max_length = {cfg.encoder.max_length}", field="task.history.max_length",
            value=cfg.history.max_length, remedy="give both the same value",
        )  # fmt: skip
