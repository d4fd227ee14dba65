"""Next-item retrieval (sequential recommendation): trained on all positions, measured by ranking the full catalog."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.base.errors import ErrorCollector, UserError
from nestrec.data.batch_loader import BatchConfig, MicroBatch
from nestrec.data.dataset import Dataset
from nestrec.data.dataset_schema import EVENT_PREFIX, ITEM_IDS, TIMESTAMPS_MS
from nestrec.data.samples.chunk_collator import RetrievalChunkCollator
from nestrec.data.samples.negative_sampling import (
    FullCatalogSampler,
    GroupSampler,
    InBatchSampler,
    NegativeSampler,
    PopularitySampler,
    UniformSampler,
)
from nestrec.data.samples.retrieval_collator import HistoryConfig, RetrievalCollator, RetrievalQueries, held_out_events
from nestrec.data.samples.retrieval_inputs import CONTEXT_PREFIX, RetrievalInputConfig, RetrievalInputs
from nestrec.data.samples.split import Part, SplitConfig, item_counts, split_dataset
from nestrec.data.samples.time_windows import (
    EventIndex,
    SampleLimits,
    TimeWindow,
    TrainingChunks,
    WindowsConfig,
    build_event_index,
    scored_runs,
    split_runs_into_chunks,
    training_chunks,
    windows_by_time,
)
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine, InitConfig, RowOptimizerConfig, StoreConfig, TableConfig
from nestrec.models.backbone_registry import EncoderConfig, activations_of, backbone_of, flops_of, reads_times
from nestrec.models.encoder_parts import FeatureProjections
from nestrec.models.heads import NegativesConfig, RetrievalModel, SimilarityConfig, candidates_of
from nestrec.models.hstu import HSTUConfig
from nestrec.ops.context_parallel.ring_sum import RingCommunicator
from nestrec.ops.embedding.row_gather import TableRows, gather_rows
from nestrec.ops.losses.cross_entropy import in_place_cross_entropy, tiled_cross_entropy
from nestrec.ops.losses.sampled_losses import VARIANTS, Variant, grouped_loss, sampled_loss
from nestrec.tasks.catalog_ranks import CatalogRanker, RetrievalEvaluationConfig, rank_chunks
from nestrec.tasks.item_tower import FeatureLookup, ItemTower
from nestrec.tasks.loss_options import LossShape, check_enough_negatives, choose_variant, mean_micro_batch_tokens
from nestrec.tasks.metrics import ConfidenceInterval, bootstrap, check_slices, ranking_metrics
from nestrec.tasks.retrieval_evaluator import RetrievalEvaluator
from nestrec.tasks.table_overrides import ResolvedTables, resolve_tables
from nestrec.tasks.task import Evaluation, Task, TaskSpec, TrainingCost, context_parallel_error, sequence_info


@config
class RetrievalTaskConfig:
    """Configuration of the retrieval task."""

    kind: Literal["retrieval"] = "retrieval"
    """Name of the task: prediction of the next item among the full catalog."""
    encoder: EncoderConfig = HSTUConfig()
    """Sequence encoder (backbone)."""
    similarity: SimilarityConfig = SimilarityConfig()
    """Similarity between encoder states and item vectors."""
    history: HistoryConfig = HistoryConfig()
    """Part of a user's history that the model reads."""
    inputs: RetrievalInputConfig = RetrievalInputConfig()
    """Features that the model reads in addition to item ids, and actions that make an event a target."""
    loss: Literal["sampled_softmax", "full", "bce"] = "sampled_softmax"
    """Loss function: softmax over sampled negatives, softmax over the full catalog, or binary cross-entropy (bce) with
    sampled negatives."""
    negatives: NegativesConfig = NegativesConfig()
    """Negative sampling and its memory use (docs/negatives.md)."""
    table_init: InitConfig = InitConfig(scale=0.02)
    """Initialization of the embedding tables."""
    table_optimizer: RowOptimizerConfig = RowOptimizerConfig(kind="adam", beta2=0.98)
    """Row optimizer of the embedding tables."""
    table_store: StoreConfig = StoreConfig()
    """Storage tier of the item table."""
    split: SplitConfig = SplitConfig(kind="leave_one_out")
    """Split into training, validation and test events."""
    evaluation: RetrievalEvaluationConfig = RetrievalEvaluationConfig()
    """Metrics, baselines and slices of evaluations."""

    def __post_init__(self) -> None:
        options = {"sampler": "uniform", "logit_sharing": 1, "lookup_dtype": "full"}
        for name, usual in options.items() if self.loss == "full" else ():
            if getattr(self.negatives, name) != usual:
                raise UserError(
                    "cannot be used with the full softmax loss, which has no sampled negatives",
                    option=f"task.negatives.{name}",
                    value=getattr(self.negatives, name),
                    remedy=f"set it to {usual}, or use --task.loss sampled_softmax",
                )


class RetrievalTask(Task):
    """Next-item retrieval with a sequence encoder and an item tower."""

    model: RetrievalModel
    reads_stored_rows = True
    remedy_if_empty = (
        "use data whose users have at least three events, because two are held out (nestrec prepare ... "
        "--min_events_per_user 3), or choose split times with events before and after them (--task.split.valid_from, "
        "--task.split.test_from). If task.inputs.target_actions is set, only events with one of these actions count"
    )

    def __init__(self, cfg: RetrievalTaskConfig, dataset: Dataset, *, seed: int, dtype: Literal["float32", "float64"]):
        self.cfg = cfg
        self._dataset = dataset
        self._use_times = reads_times(cfg.encoder)
        _check(cfg, dataset, self._use_times)
        self._split = split_dataset(cfg.split, dataset)
        self._results = RetrievalEvaluator(dataset, self._split, cfg.evaluation)
        self.variant: Variant = "plain" if cfg.negatives.loss_variant == "auto" else cfg.negatives.loss_variant
        """Implementation of the loss; if the config sets `auto`, it is chosen when a run starts."""
        is_trained = self._item_counts > 0 if cfg.inputs.item_features else None
        self._inputs = RetrievalInputs(dataset, cfg.inputs, seed=seed, is_trained=is_trained)
        self.model = RetrievalModel(cfg.encoder, cfg.similarity, len(self._inputs.prefix))
        times = [TIMESTAMPS_MS] if self._use_times else []
        self._read = dataset.select_columns([ITEM_IDS, *times, *self._inputs.columns])
        items = TableConfig(
            name="items",
            dim=cfg.encoder.dim,
            num_rows=dataset.num_items + 1,
            features=("item",) if self._inputs.has_item_features else _features(cfg),
            dtype=dtype,
            seed=seed,
            init=cfg.table_init,
            optimizer=cfg.table_optimizer,
            store=cfg.table_store,
            **_half(cfg),
        )
        self.tables = (items, *_feature_tables(self._inputs, items))
        of_all = (*self._inputs.item_columns, *self._inputs.token_columns, *self._inputs.context_columns)
        self._dense = {column.name: column.width for column in of_all if not column.vocabulary_size}
        self.bags = frozenset(column.name for column in of_all if column.is_bag)
        self.set_tables(resolve_tables(self.tables, {}, self.bags))
        self._seed = seed
        self._ring: RingCommunicator | None = None
        if _couples_tokens(cfg):
            self.couples_samples = cfg.negatives.scope
        self.collator = self.make_collator(cfg.negatives.num_negatives)

    def set_tables(self, chosen: ResolvedTables) -> None:
        self.tables = chosen.tables
        self.num_ids = chosen.num_ids
        self.pooling = chosen.pooling
        widths = {table.name: table.dim for table in chosen.tables}
        self.model.to_width = FeatureProjections(self.cfg.encoder.dim, widths, self._dense)
        vectors = FeatureLookup(chosen, self.model.to_width)
        self.item_tower = ItemTower(self.model, self._inputs, vectors, self._dataset.num_items)

    def make_collator(self, num_negatives: int) -> RetrievalCollator:
        """Return a collator that draws `num_negatives` negatives per token."""
        return RetrievalCollator(
            self._read,
            self._split,
            self.cfg.history,
            seed=self._seed,
            use_times=self._use_times,
            sampler=self._sampler(num_negatives),
            logit_sharing=self.cfg.negatives.logit_sharing,
            inputs=self._inputs,
        )

    def num_held_out(self, part: Part) -> int:
        return int(held_out_events(self._read, self._split, part, self._inputs, 1)[2].sum())

    def cost(self) -> TrainingCost:
        """Return the cost per token: the encoder, and the dot products with the positive and all negatives."""
        dim = self.cfg.encoder.dim
        layers = flops_of(self.cfg.encoder)
        num_compared = self._dataset.num_items if self.cfg.loss == "full" else self.cfg.negatives.num_negatives
        saved = num_compared if self.cfg.loss == "full" else num_compared * (dim + 2)
        flops = replace(layers, head=2.0 * dim * num_compared)
        return TrainingCost(flops=flops, activations=activations_of(self.cfg.encoder) + saved)

    def check_batches(self, batch: BatchConfig, world: int) -> None:
        if self.cfg.loss != "full":
            check_enough_negatives(self.cfg.negatives, self.cfg.negatives.num_negatives, self.collator, batch, world)

    def choose_loss_variant(
        self, batch: BatchConfig, topology: Topology, saved: str | None
    ) -> tuple[str, dict[str, float]] | None:
        """Choose the implementation of the loss by measurement, or take over the saved one. Collective."""
        options = self.cfg.negatives
        items = self.tables[0]
        if self.cfg.loss == "full" or options.loss_variant != "auto":
            return None
        if saved in VARIANTS:
            self.variant = saved
            return saved, {}
        tokens = mean_micro_batch_tokens(self.collator, batch, topology.world)
        negatives = self.cfg.negatives.num_negatives
        shape = LossShape(
            tokens=tokens,
            negatives=negatives,
            sharing=options.logit_sharing,
            dim=self.cfg.encoder.dim,
            kind=self.cfg.loss,
            rows=min(items.num_rows or 1, tokens * (negatives + 2)),
            segment_tokens=options.segment_tokens,
            dtype="float32" if items.is_half else items.dtype,
        )
        self.variant, measured_ms = choose_variant(shape, topology, options.max_memory_gib)
        return self.variant, measured_ms

    def loss(self, batch: MicroBatch, rows: Mapping[str, TableRows], index: Mapping[str, torch.Tensor]) -> torch.Tensor:
        row_UD, index, token_TD, prefix_BPD = self.item_tower.training_inputs(batch, rows, index)
        query_TD = self.model(token_TD, sequence_info(batch, self._ring), prefix_BPD)
        if "scored" in batch.tensors:
            query_TD = query_TD[batch.tensors["scored"]]
        loss_T = self._losses(query_TD, row_UD, batch, index)
        weight_T = batch.tensors.get("target_weight")
        return loss_T.sum() if weight_T is None else (loss_T * weight_T.to(loss_T.dtype)).sum()

    def _losses(
        self, query_TD: torch.Tensor, row_UD: TableRows, batch: MicroBatch, index: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the loss of each token that has a target."""
        if self.cfg.loss == "full":
            catalog_ND = self.model.item_vectors(gather_rows(row_UD, index["catalog"]))
            cross_entropy = in_place_cross_entropy if self.variant == "plain" else tiled_cross_entropy
            target_at = batch.tensors.get("target_at")
            return cross_entropy(query_TD, catalog_ND, batch.tensors["target"] - 1 if target_at is None else target_at)
        if self.cfg.negatives.sampler == "groups":
            return grouped_loss(
                query_TD,
                self.model.loss_rows(row_UD),
                index["positive"],
                batch.tensors["group_token"],
                self.cfg.loss,
                bias_T=batch.tensors.get("target_bias"),
            )
        return sampled_loss(
            query_TD,
            self.model.loss_rows(row_UD),
            candidates_of(index, batch.tensors),
            self.cfg.loss,
            variant=self.variant,
            segment_tokens=self.cfg.negatives.segment_tokens,
        )

    def windows_by_time(self, cfg: WindowsConfig, start_ms: int) -> list[TimeWindow]:
        times, offsets = self._times()
        return windows_by_time(times, offsets, self._split.train_end, cfg, start_ms)

    def set_context_ring(self, ring: RingCommunicator) -> None:
        _check_context(self.cfg, self.bags)
        self._ring = ring

    def set_windows(self, windows: Sequence[TimeWindow], past: EventIndex | None, *, replay_fraction: float) -> None:
        if self._ring is not None:
            raise context_parallel_error(
                "time windows score only some events of a sample", "batch.order", "chronological"
            )
        if self.cfg.history.stochastic_length_alpha is not None:
            raise UserError(
                "cannot be used with time windows, which train on every event once",
                option="task.history.stochastic_length_alpha",
                value=self.cfg.history.stochastic_length_alpha,
                remedy="remove it, or set --batch.order shuffled",
            )
        if self._inputs.has_target_weights:
            raise UserError(
                "cannot be used with time windows, which train on every event with equal weight",
                option="task.inputs.target_actions",
                value=self.cfg.inputs.target_actions,
                remedy="remove it and task.inputs.action_weights, or set --batch.order shuffled",
            )
        past = past or build_event_index(*self._times())
        slices = training_chunks(windows, self._limits, past, seed=self._seed, replay_fraction=replay_fraction)
        self.collator = self._slices(slices, self._sampler(self.cfg.negatives.num_negatives))

    def evaluate_window(self, engine: EmbeddingEngine, window: TimeWindow) -> dict[str, ConfidenceInterval]:
        """Compute HR, NDCG and MRR of every event that has a predecessor, in the full catalog. Collective."""
        slices = split_runs_into_chunks(scored_runs(window.runs, self._limits), self._limits.max_events)
        queries = self._slices(TrainingChunks(slices, np.array([0, len(slices)])), None)
        ranks = rank_chunks(self.item_tower, engine, queries, self.cfg.evaluation)
        return bootstrap(ranking_metrics(ranks, self.cfg.evaluation.ks), num_draws=100, groups=queries.scored_users)

    @property
    def _limits(self) -> SampleLimits:
        return SampleLimits(self.cfg.history.max_events + 1, first_scored=1)

    def _slices(self, slices: TrainingChunks, sampler: NegativeSampler | None) -> RetrievalChunkCollator:
        return RetrievalChunkCollator(
            self._read,
            slices,
            self.cfg.history,
            seed=self._seed,
            sampler=sampler,
            logit_sharing=self.cfg.negatives.logit_sharing,
            use_times=self._use_times,
            inputs=self._inputs,
        )

    def _times(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if not self._dataset.card.has_timestamps:
            raise self.no_windows_error()
        return self._dataset.rows(np.arange(self._dataset.num_samples)).lists["timestamps_ms"]

    def evaluate(self, engine: EmbeddingEngine, part: Part) -> Evaluation:
        options = self.cfg.evaluation
        queries = RetrievalQueries(
            self._read,
            self._split,
            self.cfg.history,
            part,
            use_times=self._use_times,
            max_targets=options.max_targets_per_user,
            inputs=self._inputs,
        )
        measure = CatalogRanker(self.item_tower, engine, queries, options)
        return self._results.evaluate(measure, queries, part, engine.topology)

    def _sampler(self, num_negatives: int) -> NegativeSampler | None:
        """Return the negative sampler; None for the full catalog.

        If items have features, items without training events are never drawn as negatives: they are cold-start items.
        """
        cfg = self.cfg
        options = self.cfg.negatives
        known = np.flatnonzero(self._item_counts) if self._inputs.has_item_features else None
        if cfg.loss == "full":
            return None if known is None else FullCatalogSampler(known)
        if options.sampler == "uniform":
            num_items = self._dataset.num_items if known is None else len(known)
            _check_enough(num_negatives, num_items, "items")
            return UniformSampler(num_negatives, num_items, known)
        counts_N = self._item_counts[1:]
        if options.sampler in ("in_batch", "groups"):
            kind = InBatchSampler if options.sampler == "in_batch" else GroupSampler
            return kind(counts_N if options.log_q else None, num_negatives)
        _check_enough(num_negatives, int((counts_N > 0).sum()), "items with events")
        return PopularitySampler(counts_N, num_negatives, power=options.popularity_power, log_q=options.log_q)

    @cached_property
    def _item_counts(self) -> NDArray[np.int64]:
        """Number of training events of each item, with the shape (items + 1,)."""
        return item_counts(self._dataset, self._split.train_end)

    def item_content(self, engine: EmbeddingEngine, items: NDArray[np.int64]) -> torch.Tensor:
        """Return the (items, model width) vectors of items as inputs of a history. Collective."""
        return self.item_tower.item_inputs(engine, items)


def _check_context(cfg: RetrievalTaskConfig, bags: Collection[str]) -> None:
    """Raise a UserError if the task cannot be trained with context parallelism."""
    mistakes = ErrorCollector()
    reason = backbone_of(cfg.encoder).no_context_parallel_reason(cfg.encoder)
    conflicts: list[tuple[str, str, Any]] = []
    if reason is not None:
        conflicts.append((f"{cfg.encoder.kind} needs full sequences ({reason})", "task.encoder.kind", cfg.encoder.kind))
    if _couples_tokens(cfg):
        name = "logit_sharing" if cfg.negatives.logit_sharing > 1 else "sampler"
        conflicts.append(
            (
                "the loss of a token depends on tokens of other samples",
                f"task.negatives.{name}",
                getattr(cfg.negatives, name),
            )
        )
    if cfg.inputs.item_features:
        field = "task.inputs.item_features"
        conflicts.append(("items with features are looked up for complete samples", field, cfg.inputs.item_features))
    if cfg.inputs.user_feature_mode == "prefix" and cfg.inputs.user_features:
        conflicts.append(("prefix tokens need complete histories", "task.inputs.user_feature_mode", "prefix"))
    if bags:
        conflicts.append(("features with several ids are read for complete samples", "task.inputs", sorted(bags)))
    for problem, field, value in conflicts:
        mistakes.errors.append(context_parallel_error(problem, field, value))
    mistakes.raise_if_any()


def _couples_tokens(cfg: RetrievalTaskConfig) -> bool:
    """Return whether the loss of a token depends on other tokens' targets or negatives."""
    return cfg.loss != "full" and (cfg.negatives.sampler in ("in_batch", "groups") or cfg.negatives.logit_sharing > 1)


def _feature_tables(inputs: RetrievalInputs, like: TableConfig) -> Iterator[TableConfig]:
    """Yield one table per feature; a feature of the event itself and of the next event share a table."""
    read: dict[str, tuple[int, list[str]]] = {}
    for column in (*inputs.token_columns, *inputs.item_columns, *inputs.context_columns):
        if column.vocabulary_size:
            name = column.name
            if name.startswith(CONTEXT_PREFIX):
                name = EVENT_PREFIX + name.removeprefix(CONTEXT_PREFIX)
            read.setdefault(name, (column.vocabulary_size, []))[1].append(column.name)
    for index_of_table, (name, (num_rows, features)) in enumerate(read.items()):
        yield replace(
            like,
            name=name,
            num_rows=num_rows,
            features=tuple(features),
            seed=like.seed + 1 + index_of_table,
            store=StoreConfig(),
            half_precision_features=(),
        )


def _features(cfg: RetrievalTaskConfig) -> tuple[str, ...]:
    """Return the features that read the item table; in-batch negatives need no lookups of their own."""
    if cfg.loss == "full":
        return "history", "positive", "catalog"
    draws_targets = cfg.negatives.sampler in ("in_batch", "groups")
    return ("history", "positive") if draws_targets else ("history", "positive", "negative")


def _half(cfg: RetrievalTaskConfig) -> dict[str, Any]:
    """Return the fields of the item table for negatives that are transferred in half precision."""
    if cfg.inputs.item_features:
        return {}
    if cfg.negatives.lookup_dtype == "full" or "negative" not in _features(cfg):
        return {}
    return {"half_precision_features": ("negative",), "half_dtype": cfg.negatives.lookup_dtype}


def _check_enough(num_negatives: int, num_items: int, what: str) -> None:
    if num_items <= num_negatives:
        raise UserError(
            f"there must be more {what} than negatives, but there are {num_items}",
            option="task.negatives.num_negatives",
            value=num_negatives,
            remedy="use fewer negatives, or the full catalog with --task.loss full",
        )


def _check(cfg: RetrievalTaskConfig, dataset: Dataset, use_times: bool) -> None:
    mistakes = ErrorCollector()
    with mistakes.collecting():
        check_slices(cfg.evaluation.slices, dataset, "task.evaluation.slices")
    if use_times and not dataset.card.has_timestamps:
        name = backbone_of(cfg.encoder).times_field or "kind"
        field = f"task.encoder.{name}"
        other = "use another backbone" if name == "kind" else "set it to false"
        mistakes.add(
            "needs timestamps, but the dataset has none",
            option=field,
            value=getattr(cfg.encoder, name),
            remedy=f"{other}, or prepare the data from files with timestamps",
        )
    if cfg.history.max_events != cfg.encoder.max_length:
        mistakes.add(
            f"must be equal to task.encoder.max_length, which is {cfg.encoder.max_length}",
            option="task.history.max_events",
            value=cfg.history.max_events,
            remedy="set both to the same value",
        )
    if cfg.inputs.item_features and cfg.negatives.lookup_dtype != "full":
        mistakes.add(
            "cannot be used with item features, because each item is looked up once for all of its uses",
            option="task.negatives.lookup_dtype",
            value=cfg.negatives.lookup_dtype,
            remedy="set it to full, or store all rows in 16 bits (--tables.items.dtype bfloat16)",
        )
    if (cfg.inputs.target_actions or cfg.inputs.action_weights) and cfg.history.stochastic_length_alpha is not None:
        mistakes.add(
            "cannot be used with target actions, because the weight of a sample must be known before it is cut",
            option="task.history.stochastic_length_alpha",
            value=cfg.history.stochastic_length_alpha,
            remedy="remove it, or remove task.inputs.target_actions and task.inputs.action_weights",
        )
    mistakes.raise_if_any()


TASK = TaskSpec(
    config=RetrievalTaskConfig,
    make=RetrievalTask,
    store_field="table_store",
    serving="retrieval",
)
