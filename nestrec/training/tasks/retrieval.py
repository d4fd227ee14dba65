"""Next-item retrieval: trained on every position, measured by ranking the whole catalogue."""

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.base.errors import UserError
from nestrec.data.batches import MicroBatch
from nestrec.data.dataset import Dataset
from nestrec.data.retrieval import HistoryConfig, RetrievalAssembler, RetrievalQueries
from nestrec.data.split import Part, leave_one_out
from nestrec.data.windows import window_index
from nestrec.embedding import EmbeddingEngine, InitConfig, RowOptimizerConfig, StoreConfig, TableConfig
from nestrec.models.hstu import HSTUConfig
from nestrec.models.retrieval import EncoderConfig, RetrievalModel, SimilarityConfig
from nestrec.ops.gather_rows import gather_rows
from nestrec.ops.softmax_losses import bce, full_cross_entropy, sampled_logits, sampled_softmax
from nestrec.training.baselines import LastItem, Popularity
from nestrec.training.metrics import bootstrap, ranking_metrics
from nestrec.training.tasks.catalogue_ranks import CatalogueRanks, RetrievalEvaluationConfig
from nestrec.training.tasks.task import Evaluation, Task, sequence_info


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
    model: RetrievalModel

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
                name="items", dim=cfg.encoder.dim, num_rows=dataset.num_items + 1, features=features, dtype=dtype,
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
            catalogue_ND = self.model.item_vectors(gather_rows(row_UD, index["catalogue"]))
            return full_cross_entropy(query_TD, catalogue_ND, batch.tensors["target"] - 1).sum()
        candidate_UD = self.model.item_vectors(row_UD)
        positive, negative = sampled_logits(query_TD, candidate_UD, index["positive"], index["negative"])
        return (
            sampled_softmax(positive, negative) if self.cfg.loss == "sampled_softmax" else bce(positive, negative)
        ).sum()

    def evaluate(self, engine: EmbeddingEngine, part: Part) -> Evaluation:
        queries = RetrievalQueries(self._dataset, self._split, self.cfg.history, part, use_times=self._use_times)
        measure = CatalogueRanks(self.model, engine, queries, self.cfg.evaluation, self._dataset.num_items)
        if part not in self._baselines:
            self._baselines[part] = self._baseline_ranks(measure)
        rank = {"model": measure.of_model(), **self._baselines[part]}
        if self.cfg.evaluation.sampled_negatives:
            rank["model, sampled"] = measure.among_sampled()
        # A validation is one of many and only its mean decides; the test is the figure that people quote.
        num_draws = 1000 if part == "test" else 100
        metrics = {
            system: bootstrap(ranking_metrics(r, self.cfg.evaluation.ks), num_draws=num_draws)
            for system, r in rank.items()
        }
        details = {"users": queries.users, **{f"rank/{system}": r for system, r in rank.items()}}
        return Evaluation(part, self.cfg.evaluation.headline, metrics, details)

    def _baseline_ranks(self, measure: CatalogueRanks) -> dict[str, NDArray[np.int64]]:
        items, offsets = self._dataset.rows(np.arange(self._dataset.num_samples)).lists["item_ids"]
        index, train_offsets = window_index(offsets[:-1], offsets[:-1] + self._split.train_end)
        popularity = Popularity(items[index], self._dataset.num_items)
        last_item = LastItem(items[index], train_offsets, popularity)
        return {"popularity": measure.of_baseline(popularity), "last item": measure.of_baseline(last_item)}


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
