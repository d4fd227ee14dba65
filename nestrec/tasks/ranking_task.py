"""Multi-task ranking: predicts several actions per event, measured by AUC and normalized entropy on later events."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import binary_cross_entropy_with_logits

from nestrec.base.config import config
from nestrec.base.config_values import Count, Natural
from nestrec.base.errors import ErrorCollector, UserError, did_you_mean
from nestrec.base.random import mix64_array
from nestrec.data.batch_loader import Collator, MicroBatch
from nestrec.data.dataset import Dataset
from nestrec.data.dataset_schema import ITEM_PREFIX
from nestrec.data.flat_arrays import history_start, resolve_slide_events, slice_index
from nestrec.data.samples.chunk_collator import RankingChunkCollator
from nestrec.data.samples.ranking_collator import (
    RankingCollator,
    RankingHistoryConfig,
    RankingInputConfig,
    RankingInputs,
    feature_columns,
    label_bits,
)
from nestrec.data.samples.split import Part, SplitConfig, split_dataset
from nestrec.data.samples.time_windows import (
    EventIndex,
    SampleLimits,
    TimeWindow,
    TrainingChunks,
    WindowsConfig,
    build_event_index,
    held_out_chunks,
    split_runs_into_chunks,
    training_chunks,
    windows_by_time,
)
from nestrec.embedding import EmbeddingEngine, InitConfig, RowOptimizerConfig, StoreConfig, TableConfig
from nestrec.models.backbone_registry import EncoderConfig, activations_of, backbone_of, flops_of
from nestrec.models.encoder_parts import FeatureProjections, sum_features
from nestrec.models.heads import HeadConfig, RankingModel, head_width
from nestrec.models.hstu import HSTUConfig
from nestrec.ops.embedding.row_gather import TableRows
from nestrec.pipeline.exchange_window import on_device
from nestrec.tasks.item_tower import FeatureLookup, VectorOf, prefix_vectors
from nestrec.tasks.metrics import ConfidenceInterval, check_slices, user_aucs, weighted_bootstrap, window_metrics
from nestrec.tasks.ranking_evaluator import BASELINES, BaselineName, ListwiseScores, RankingEvaluator
from nestrec.tasks.table_overrides import ResolvedTables, resolve_tables
from nestrec.tasks.task import Evaluation, Task, TaskSpec, TrainingCost, batches_of_rank, sequence_info, sum_over_ranks


@config
class RankingEvaluationConfig:
    """Evaluation options of the ranking task."""

    baseline_category: str = ""
    """Event feature that the logistic baseline uses in addition to item and user rates; '' for none."""
    baselines: tuple[BaselineName, ...] = BASELINES
    """Baselines that are evaluated next to the model; `boosted trees` needs the extra `trees`."""
    slices: tuple[str, ...] = ("items", "users", "history")
    """Slices of the events with metrics of their own: `items` (by training events of the item), `users` (by whether
    the user was trained on), `history` (by its length), or the column of a category, such as event_tab."""
    batch_size: Count = 256
    """Number of history chunks scored per batch in evaluation."""
    listwise_events: Natural = 20_000
    """Maximum number of test events that are also scored listwise: all held-out events of a user at once, from the
    history before the first of them, as a server ranks candidates. The result `model, at once` is reported next to
    `model`, which knows the reactions to earlier events. Users are chosen by hash; 0 disables it."""
    listwise_window_events: Natural = 0
    """Maximum number of events per time window that are scored listwise, reported as `gauc_at_once` next to `gauc`. One
    event costs as much as scoring a full history, so use about 1000; 0 disables it."""


@config
class RankingTaskConfig:
    """Configuration of the ranking task."""

    kind: Literal["ranking"] = "ranking"
    """Name of the task: multi-task ranking over actions."""
    encoder: EncoderConfig = HSTUConfig()
    """Sequence encoder (backbone)."""
    head: HeadConfig = HeadConfig()
    """Prediction head that maps encoder states to logits."""
    history: RankingHistoryConfig = RankingHistoryConfig()
    """Part of a user's history that the model reads."""
    inputs: RankingInputConfig = RankingInputConfig()
    """Features that the model reads and labels that it predicts."""
    split: SplitConfig = SplitConfig()
    """Split into training, validation and test events."""
    table_init: InitConfig = InitConfig(scale=0.02)
    """Initialization of all embedding tables."""
    table_optimizer: RowOptimizerConfig = RowOptimizerConfig(kind="adam", beta2=0.98)
    """Row optimizer of all embedding tables."""
    table_store: StoreConfig = StoreConfig()
    """Storage tier of the item table."""
    evaluation: RankingEvaluationConfig = RankingEvaluationConfig()
    """Baselines, slices and listwise scoring of evaluations."""


class RankingTask(Task):
    """Multi-task ranking on sequences of item and action tokens (two tokens per event)."""

    model: RankingModel
    reads_stored_rows = True
    remedy_if_empty = (
        "choose split times with events before and after them: --task.split.valid_from, --task.split.test_from"
    )

    def __init__(self, cfg: RankingTaskConfig, dataset: Dataset, *, seed: int, dtype: Literal["float32", "float64"]):
        self.cfg = cfg
        self._dataset = dataset
        self._seed = seed
        _check(cfg, dataset)
        self._split = split_dataset(cfg.split, dataset)
        self._results = RankingEvaluator(
            dataset,
            self._split,
            cfg.inputs.labels,
            baselines=cfg.evaluation.baselines,
            category=cfg.evaluation.baseline_category,
            slices=cfg.evaluation.slices,
        )
        self._inputs = RankingInputs(dataset, cfg.inputs, seed=seed)
        num_bits = max(dataset.card.action_bits.values()).bit_length()
        self.model = RankingModel(
            cfg.encoder,
            cfg.head,
            num_tasks=len(cfg.inputs.labels),
            num_action_bits=num_bits,
            num_prefix=len(self._inputs.prefix),
            num_features=1 + len(self._inputs.columns),
        )
        items = TableConfig(
            name="items",
            dim=cfg.encoder.dim,
            num_rows=dataset.card.counts.items + 1,
            features=("item",),
            dtype=dtype,
            seed=seed,
            init=cfg.table_init,
            optimizer=cfg.table_optimizer,
            store=cfg.table_store,
        )
        self._features = ("item", *(c.name for c in self._inputs.columns))
        category = replace(items, features=(), store=StoreConfig())
        self.tables = (
            items,
            *(
                replace(category, name=c.name, num_rows=c.vocabulary_size, seed=seed + 1 + i)
                for i, c in enumerate(self._inputs.columns)
                if c.vocabulary_size
            ),
        )
        self.bags = frozenset(c.name for c in self._inputs.columns if c.is_bag)
        self.set_tables(resolve_tables(self.tables, {}, self.bags))
        self.collator: Collator = RankingCollator(self._inputs, self._split, cfg.history.max_events)
        if cfg.inputs.train_events == "all":
            end = self._split.train_end
            runs = np.stack([np.arange(len(end)), np.zeros_like(end), end], axis=1)
            self.collator = RankingChunkCollator(
                self._inputs, TrainingChunks(split_runs_into_chunks(runs, cfg.history.max_events), None), seed
            )

    def set_tables(self, chosen: ResolvedTables) -> None:
        self.tables = chosen.tables
        self.num_ids = chosen.num_ids
        self.pooling = chosen.pooling
        dense = {c.name: c.width for c in self._inputs.columns if not c.vocabulary_size}
        widths = {table.name: table.dim for table in chosen.tables}
        self.model.to_width = FeatureProjections(self.cfg.encoder.dim, widths, dense)
        self._vectors = FeatureLookup(chosen, self.model.to_width)

    def num_held_out(self, part: Part) -> int:
        first, end = self._split.held_out(part)
        return int((end - first).sum())

    @property
    def _slide_events(self) -> int:
        return resolve_slide_events(self.cfg.history.max_events, self.cfg.history.slide_events)

    def _cut_of(self, num_events: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first token that all layers compute, by number of events including the target."""
        encoder = self.cfg.encoder
        num_prefix = len(self._inputs.prefix)
        cut = backbone_of(encoder).cut
        cuts = [cut(encoder, num_prefix + 2 * length) for length in range(self.cfg.history.max_events + 1)]
        return np.array(cuts, np.int64)[num_events]

    def cost(self) -> TrainingCost:
        """Return the cost per token: the encoder on two tokens per event, and the head on one of them."""
        layers = flops_of(self.cfg.encoder)
        first = head_width(self.cfg.encoder.dim, self.cfg.head, len(self._features))
        widths = (first, *self.cfg.head.hidden_dims, len(self.cfg.inputs.labels))
        head = 2.0 * sum(a * b for a, b in itertools.pairwise(widths))
        return TrainingCost(
            flops=replace(layers, head=head / 2),
            activations=activations_of(self.cfg.encoder) + sum(widths) / 2,
        )

    def loss(self, batch: MicroBatch, rows: Mapping[str, TableRows], index: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logit_EK = self._forward(batch, lambda feature: self._vectors.from_unique_rows(feature, batch, rows, index))
        label_EK = batch.tensors["label"].to(logit_EK.dtype)
        scored_E = batch.tensors.get("scored")
        weight = None if scored_E is None else scored_E[:, None].to(logit_EK.dtype)
        return binary_cross_entropy_with_logits(logit_EK, label_EK, weight, reduction="sum")

    def _forward(self, batch: MicroBatch, of: VectorOf) -> torch.Tensor:
        """Return the (E, K) logits of the events of a batch."""
        vectors_of = {name: of(name) for name in self._features}
        content_ED = sum_features([vectors for name, vectors in vectors_of.items() if name not in self._inputs.prefix])
        prefix_BPD = prefix_vectors(self._inputs.prefix, batch, vectors_of.__getitem__, tokens_per_event=2)
        feature_ECD = torch.stack(list(vectors_of.values()), dim=1) if self.cfg.head.interactions else None
        action_E = batch.tensors["action"]
        info = sequence_info(batch)
        logits: torch.Tensor = self.model(content_ED, action_E, info, prefix_BPD, feature_ECD)
        return logits

    def windows_by_time(self, cfg: WindowsConfig, start_ms: int) -> list[TimeWindow]:
        times, offsets = self._times()
        return windows_by_time(times, offsets, self._split.train_end, cfg, start_ms)

    def set_windows(self, windows: Sequence[TimeWindow], past: EventIndex | None, *, replay_fraction: float) -> None:
        past = past or build_event_index(*self._times())
        limits = SampleLimits(self.cfg.history.max_events, first_scored=0)
        slices = training_chunks(windows, limits, past, seed=self._seed, replay_fraction=replay_fraction)
        self.collator = RankingChunkCollator(self._inputs, slices, self._seed)

    def evaluate_window(self, engine: EmbeddingEngine, window: TimeWindow) -> dict[str, ConfidenceInterval]:
        """Compute AUC, GAUC, NDCG and normalized entropy of each label on a time window. Collective.

        The model knows the reactions to earlier events of the window; `gauc_at_once` is computed without them if
        `listwise_window_events` is set.
        """
        logit_EK, label_EK, user_E = self._scores(
            engine, split_runs_into_chunks(window.runs, self.cfg.history.max_events)
        )
        metrics: dict[str, ConfidenceInterval] = {}
        for k, name in enumerate(self.cfg.inputs.labels):
            metrics |= {f"{m}/{name}": v for m, v in window_metrics(label_EK[:, k], logit_EK[:, k], user_E).items()}
        if self.cfg.evaluation.listwise_window_events:
            of = self._score_listwise(engine, window.runs, self.cfg.evaluation.listwise_window_events)
            for k, name in enumerate(self.cfg.inputs.labels):
                aucs = user_aucs(label_EK[of.events, k], of.logits[:, k], user_E[of.events])
                metrics[f"gauc_at_once/{name}"] = weighted_bootstrap(*aucs)
        return metrics

    def _times(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return self._dataset.rows(np.arange(self._dataset.num_samples)).lists["timestamps_ms"]

    def evaluate(self, engine: EmbeddingEngine, part: Part) -> Evaluation:
        slices = held_out_chunks(self._split, part, self.cfg.history.max_events, self._slide_events, self._cut_of)
        logit_EK, label_EK, user_E = self._scores(engine, slices)
        listwise = None
        if part == "test" and self.cfg.evaluation.listwise_events:
            first, end = self._split.held_out(part)
            runs = np.stack([np.arange(len(first)), first, end], axis=1)
            listwise = self._score_listwise(engine, runs, self.cfg.evaluation.listwise_events)
        return self._results.evaluate(part, logit_EK, label_EK, user_E, engine.topology, listwise)

    def _score_listwise(self, engine: EmbeddingEngine, runs: NDArray[np.int64], limit: int) -> ListwiseScores:
        """Score events of some users listwise, each with the history before the first event of its run.

        Args:
            engine: The embedding engine.
            runs: Runs of events with the shape (R, 3) and the columns (user, first, end).
            limit: Maximum number of events.
        """
        user_R, first_R, end_R = runs.T
        event_E, _ = slice_index(first_R, end_R)
        run_E = np.repeat(np.arange(len(runs)), end_R - first_R)
        selected = np.flatnonzero(_sample_users(user_R, end_R - first_R, limit)[run_E])
        logits = np.zeros((len(selected), len(self.cfg.inputs.labels)))
        topology = engine.topology
        longest = self.cfg.history.max_events - 1
        start_R = history_start(first_R, longest, self._slide_events)
        for chosen in batches_of_rank(
            np.arange(len(selected)), self.cfg.evaluation.batch_size, topology.rank, topology.world
        ):
            of = run_E[selected[chosen]]
            first = first_R[of]
            before = start_R[of]
            batch = self._inputs.collate_queries(
                self._inputs.read(user_R[of]), before, first, event_E[selected[chosen]]
            )
            logits[chosen] = self._logits(engine, batch)[np.cumsum(first - before + 1) - 1]
        return ListwiseScores(selected, sum_over_ranks(topology, logits))

    def _scores(
        self, engine: EmbeddingEngine, slices: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the (E, K) logits, (E, K) labels and (E,) users of all scored events, in the order of the chunks."""
        num_scored = slices[:, 2] - slices[:, 3]
        offsets = np.concatenate([[0], np.cumsum(num_scored)])
        num_tasks = len(self.cfg.inputs.labels)
        logits, labels = np.zeros((offsets[-1], num_tasks)), np.zeros((offsets[-1], num_tasks), dtype=np.int64)
        topology = engine.topology
        for chosen in batches_of_rank(
            np.arange(len(slices)), self.cfg.evaluation.batch_size, topology.rank, topology.world
        ):
            user, slice_first, slice_end, scored_from = slices[chosen].T
            batch = self._inputs.collate_chunks(self._inputs.read(user), slice_first, slice_end, epoch=0)
            logit_EK = self._logits(engine, batch)
            scored, counts = slice_index(scored_from - slice_first, slice_end - slice_first)
            event_offsets = np.concatenate([[0], np.cumsum(slice_end - slice_first)])
            source = scored + np.repeat(event_offsets[:-1], np.diff(counts))
            target, _ = slice_index(offsets[chosen], offsets[chosen + 1])
            logits[target] = logit_EK[source]
            labels[target] = batch.tensors["label"].numpy()[source]
        users = np.repeat(slices[:, 0], num_scored)
        return sum_over_ranks(topology, logits), sum_over_ranks(topology, labels), users

    def _logits(self, engine: EmbeddingEngine, batch: MicroBatch) -> NDArray[np.float64]:
        vectors = engine.lookup_readonly(batch.keys)
        if batch.num_tokens == 0:
            return np.zeros((0, len(self.cfg.inputs.labels)))
        moved = on_device(batch, engine.device)
        self.model.eval()
        with torch.no_grad():
            logits = self._forward(moved, lambda feature: self._vectors.from_lookup(feature, moved, vectors))
        self.model.train()
        return logits.double().cpu().numpy()

    def item_content(self, engine: EmbeddingEngine, items: NDArray[np.int64]) -> torch.Tensor:
        """Return the item part of event content, without event and user features. Collective.

        Returns:
            Vectors of shape (items, model width). If the head reads interactions, it needs the vectors of the id and
            of each feature separately; they are then concatenated.
        """
        batch = self._inputs.collate_items(items)
        vectors = engine.lookup_readonly(batch.keys)
        moved = on_device(batch, engine.device)
        with torch.no_grad():
            of_item = [name for name in self._features if name == "item" or name.startswith(ITEM_PREFIX)]
            parts = [self._vectors.from_lookup(name, moved, vectors) for name in of_item]
            return torch.cat(parts, dim=1) if self.cfg.head.interactions else sum_features(parts)


def _sample_users(user_R: NDArray[np.int64], num_events_R: NDArray[np.int64], limit: int) -> NDArray[np.bool_]:
    """Select users in hash order with at most `limit` events in total, but at least one user."""
    order = np.argsort(mix64_array(user_R))
    order = order[num_events_R[order] > 0]
    is_selected = np.zeros(len(user_R), np.bool_)
    is_selected[order[: max(1, int((np.cumsum(num_events_R[order]) <= limit).sum()))]] = True
    return is_selected


def _check(cfg: RankingTaskConfig, dataset: Dataset) -> None:
    """Raise all conflicts between the config and the dataset together."""
    card = dataset.card
    mistakes = ErrorCollector()
    with mistakes.collecting():
        if not card.has_timestamps or not card.action_bits:
            raise UserError(
                "ranking needs timestamps and actions, which this dataset does not have",
                option="data.folder",
                value=str(dataset.folder),
                remedy="prepare the data from a log that has both (--log.time, --log.actions)",
            )
        if not cfg.inputs.labels:
            remedy = did_you_mean("", card.action_bits)
            raise UserError(
                "at least one label is required", option="task.inputs.labels", value=cfg.inputs.labels, remedy=remedy
            )
        label_bits(card, cfg.inputs)
    with mistakes.collecting():
        check_slices(cfg.evaluation.slices, dataset, "task.evaluation.slices")
    with mistakes.collecting():
        feature_columns(card, cfg.inputs)
    categories = [feature.name for feature in card.event_features if feature.kind == "category"]
    if cfg.evaluation.baseline_category and cfg.evaluation.baseline_category not in categories:
        mistakes.add(
            "no such category among the dataset's event features",
            option="task.evaluation.baseline_category",
            value=cfg.evaluation.baseline_category,
            remedy=f"{did_you_mean(cfg.evaluation.baseline_category, categories)}; '' uses none",
        )
    if 2 * cfg.history.max_events != cfg.encoder.max_length:
        mistakes.add(
            f"must be twice task.history.max_events = {cfg.history.max_events}",
            option="task.encoder.max_length",
            value=cfg.encoder.max_length,
            remedy="set it to that value: each event has two tokens, item and action",
        )
    mistakes.raise_if_any()


TASK = TaskSpec(
    config=RankingTaskConfig,
    make=RankingTask,
    store_field="table_store",
    serving="ranking",
)
