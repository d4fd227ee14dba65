"""Next-item retrieval: trained on every position, measured by ranking the whole catalogue."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.base.config_values import Count
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
from nestrec.data.samples.split import Part, SplitConfig, item_counts, split_of
from nestrec.data.samples.time_windows import (
    EventIndex,
    SampleLimits,
    TimeWindow,
    TrainingChunks,
    WindowsConfig,
    past_of,
    scored_runs,
    slices_of_runs,
    training_slices,
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
from nestrec.ops.losses.cross_entropy import kept_cross_entropy, tiled_cross_entropy
from nestrec.ops.losses.sampled_losses import VARIANTS, Variant, grouped_loss, sampled_loss
from nestrec.tasks.catalog_ranks import CatalogRanker, RetrievalEvaluationConfig, ranks_of_slices
from nestrec.tasks.item_tower import FeatureLookup, ItemTower
from nestrec.tasks.loss_options import LossShape, check_supply, choose_variant, mean_micro_batch
from nestrec.tasks.metrics import ConfidenceInterval, bootstrap, check_slices, ranking_metrics
from nestrec.tasks.retrieval_evaluator import RetrievalEvaluator
from nestrec.tasks.table_overrides import ResolvedTables, chosen_tables
from nestrec.tasks.task import Evaluation, Task, TaskSpec, TrainingCost, sequence_info, whole_samples_only


@config
class RetrievalTaskConfig:
    kind: Literal["retrieval"] = "retrieval"
    """what is learnt: the next item of each history, out of the whole catalogue"""
    encoder: EncoderConfig = HSTUConfig()
    """the backbone"""
    similarity: SimilarityConfig = SimilarityConfig()
    """how states and items meet"""
    history: HistoryConfig = HistoryConfig()
    """what of a user's history the model sees"""
    inputs: RetrievalInputConfig = RetrievalInputConfig()
    """what it reads beside ids, and which events it is to find"""
    loss: Literal["sampled_softmax", "full", "bce"] = "sampled_softmax"
    """what the next item is told from: sampled negatives (softmax), the whole catalogue, or single negatives (bce)"""
    num_negatives: Count = 128
    """negatives drawn for a token, with replacement"""
    negatives: NegativesConfig = NegativesConfig()
    """where they are drawn from, and what they cost (docs/negatives.md)"""
    item_init: InitConfig = InitConfig(scale=0.02)
    """first values of item vectors"""
    item_optimizer: RowOptimizerConfig = RowOptimizerConfig(kind="adam", beta2=0.98)
    """row optimiser of the item table"""
    item_store: StoreConfig = StoreConfig()
    """where the item table lives"""
    split: SplitConfig = SplitConfig(kind="leave_one_out")
    """which events validate and test"""
    evaluation: RetrievalEvaluationConfig = RetrievalEvaluationConfig()
    """how the model is measured"""

    def __post_init__(self) -> None:
        options = {"sampler": "uniform", "sharing": 1, "lookup": "full"}
        for name, usual in options.items() if self.loss == "full" else ():
            if getattr(self.negatives, name) != usual:
                raise UserError(
                    "means nothing to task.loss = 'full', which meets the whole catalogue",
                    option=f"task.negatives.{name}",
                    value=getattr(self.negatives, name),
                    remedy=f"leave it at {usual}, or take --task.loss sampled_softmax",
                )


class RetrievalTask(Task):
    model: RetrievalModel
    reads_stored_rows = True
    remedy_if_empty = (
        "give it users with three events and more: two are held out (nestrec prepare ... --user_core 3); or cut where "
        "there are events on both sides (--task.split.valid_from, --task.split.test_from). Where task.inputs.actions "
        "names some, events with one of them count"
    )

    def __init__(self, cfg: RetrievalTaskConfig, dataset: Dataset, *, seed: int, dtype: Literal["float32", "float64"]):
        self.cfg = cfg
        self._dataset = dataset
        self._use_times = reads_times(cfg.encoder)
        _check(cfg, dataset, self._use_times)
        self._split = split_of(cfg.split, dataset)
        self._results = RetrievalEvaluator(dataset, self._split, cfg.evaluation)
        self.variant: Variant = "plain" if cfg.negatives.variant == "auto" else cfg.negatives.variant
        """how the loss is computed; where the config says auto, set when a run begins"""
        is_trained = self._item_counts > 0 if cfg.inputs.item_features else None
        self._inputs = RetrievalInputs(dataset, cfg.inputs, seed=seed, is_trained=is_trained)
        self.model = RetrievalModel(cfg.encoder, cfg.similarity, len(self._inputs.prefix))
        times = [TIMESTAMPS_MS] if self._use_times else []
        self._read = dataset.only([ITEM_IDS, *times, *self._inputs.columns])
        items = TableConfig(
            name="items",
            dim=cfg.encoder.dim,
            num_rows=dataset.num_items + 1,
            features=("item",) if self._inputs.has_item_features else _features(cfg),
            dtype=dtype,
            seed=seed,
            init=cfg.item_init,
            optimizer=cfg.item_optimizer,
            store=cfg.item_store,
            **_half(cfg),
        )
        self.tables = (items, *_feature_tables(self._inputs, items))
        of_all = (*self._inputs.item_columns, *self._inputs.token_columns, *self._inputs.context_columns)
        self._dense = {column.name: column.width for column in of_all if not column.vocabulary_size}
        self.bags = frozenset(column.name for column in of_all if column.is_bag)
        self.take(chosen_tables(self.tables, {}, self.bags))
        self._seed = seed
        self._ring: RingCommunicator | None = None
        if _meets_others(cfg):
            self.couples_samples = cfg.negatives.reach
        self.assembler = self.assembler_of(cfg.num_negatives)

    def take(self, chosen: ResolvedTables) -> None:
        self.tables = chosen.tables
        self.num_ids = chosen.num_ids
        self.pooling = chosen.pooling
        widths = {table.name: table.dim for table in chosen.tables}
        self.model.to_width = FeatureProjections(self.cfg.encoder.dim, widths, self._dense)
        vectors = FeatureLookup(chosen, self.model.to_width)
        self.side = ItemTower(self.model, self._inputs, vectors, self._dataset.num_items)

    def assembler_of(self, num_negatives: int) -> RetrievalCollator:
        """Samples with so many negatives a token."""
        return RetrievalCollator(
            self._read,
            self._split,
            self.cfg.history,
            seed=self._seed,
            use_times=self._use_times,
            sampler=self._sampler(num_negatives),
            sharing=self.cfg.negatives.sharing,
            inputs=self._inputs,
        )

    def num_held_out(self, part: Part) -> int:
        return int(held_out_events(self._read, self._split, part, self._inputs, 1)[2].sum())

    def cost(self) -> TrainingCost:
        """The layers, and a product with the positive's and every negative's vector, which the plain loss keeps."""
        dim = self.cfg.encoder.dim
        layers = flops_of(self.cfg.encoder)
        num_met = self._dataset.num_items if self.cfg.loss == "full" else self.cfg.num_negatives
        kept = num_met if self.cfg.loss == "full" else num_met * (dim + 2)
        flops = replace(layers, head=2.0 * dim * num_met)
        return TrainingCost(flops=flops, activations=activations_of(self.cfg.encoder) + kept)

    def check_batches(self, batch: BatchConfig, world: int) -> None:
        if self.cfg.loss != "full":
            check_supply(self.cfg.negatives, self.cfg.num_negatives, self.assembler, batch, world)

    def settle(self, batch: BatchConfig, topology: Topology, saved: str | None) -> tuple[str, dict[str, float]] | None:
        """How the loss is computed."""
        options = self.cfg.negatives
        items = self.tables[0]
        if self.cfg.loss == "full" or options.variant != "auto":
            return None
        if saved in VARIANTS:
            self.variant = saved
            return saved, {}
        tokens = mean_micro_batch(self.assembler, batch, topology.world)
        negatives = self.cfg.num_negatives
        shape = LossShape(
            tokens=tokens,
            negatives=negatives,
            sharing=options.sharing,
            dim=self.cfg.encoder.dim,
            kind=self.cfg.loss,
            rows=min(items.num_rows or 1, tokens * (negatives + 2)),
            segment_tokens=options.segment_tokens,
            dtype="float32" if items.is_half else items.dtype,
        )
        self.variant, measured_ms = choose_variant(shape, topology, options.memory_gib)
        return self.variant, measured_ms

    def loss(self, batch: MicroBatch, rows: Mapping[str, TableRows], index: Mapping[str, torch.Tensor]) -> torch.Tensor:
        row_UD, index, token_TD, prefix_BPD = self.side.read(batch, rows, index)
        query_TD = self.model(token_TD, sequence_info(batch, self._ring), prefix_BPD)
        if "scored" in batch.tensors:
            query_TD = query_TD[batch.tensors["scored"]]
        loss_T = self._losses(query_TD, row_UD, batch, index)
        weight_T = batch.tensors.get("target_weight")
        return loss_T.sum() if weight_T is None else (loss_T * weight_T.to(loss_T.dtype)).sum()

    def _losses(
        self, query_TD: torch.Tensor, row_UD: TableRows, batch: MicroBatch, index: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Of each token that has a target."""
        if self.cfg.loss == "full":
            catalogue_ND = self.model.item_vectors(gather_rows(row_UD, index["catalogue"]))
            cross_entropy = kept_cross_entropy if self.variant == "plain" else tiled_cross_entropy
            target_at = batch.tensors.get("target_at")
            return cross_entropy(
                query_TD, catalogue_ND, batch.tensors["target"] - 1 if target_at is None else target_at
            )
        if self.cfg.negatives.sampler == "groups":
            return grouped_loss(
                query_TD,
                self.model.compared_rows(row_UD),
                index["positive"],
                batch.tensors["group_token"],
                self.cfg.loss,
                bias_T=batch.tensors.get("target_bias"),
            )
        return sampled_loss(
            query_TD,
            self.model.compared_rows(row_UD),
            candidates_of(index, batch.tensors),
            self.cfg.loss,
            variant=self.variant,
            segment_tokens=self.cfg.negatives.segment_tokens,
        )

    def windows_by_time(self, cfg: WindowsConfig, start_ms: int) -> list[TimeWindow]:
        times, offsets = self._times()
        return windows_by_time(times, offsets, self._split.train_end, cfg, start_ms)

    def take_context(self, ring: RingCommunicator) -> None:
        _check_context(self.cfg, self.bags)
        self._ring = ring

    def take_windows(self, windows: Sequence[TimeWindow], past: EventIndex | None, *, replay_share: float) -> None:
        if self._ring is not None:
            raise whole_samples_only("windows of time score some events of a sample", "batch.order", "chronological")
        if self.cfg.history.stochastic_length_alpha is not None:
            raise UserError(
                "windows of time train on every event once",
                option="task.history.stochastic_length_alpha",
                value=self.cfg.history.stochastic_length_alpha,
                remedy="leave it out, or take --batch.order shuffled",
            )
        if self._inputs.weighs_targets:
            raise UserError(
                "windows of time train on every event alike",
                option="task.inputs.actions",
                value=self.cfg.inputs.actions,
                remedy="leave it and task.inputs.action_weights out, or take --batch.order shuffled",
            )
        past = past or past_of(*self._times())
        slices = training_slices(windows, self._reach, past, seed=self._seed, replay_share=replay_share)
        self.assembler = self._slices(slices, self._sampler(self.cfg.num_negatives))

    def predict(self, engine: EmbeddingEngine, window: TimeWindow) -> dict[str, ConfidenceInterval]:
        """HR, NDCG and MRR of every event that has one before it, in the whole catalogue."""
        slices = slices_of_runs(scored_runs(window.runs, self._reach), self._reach.max_events)
        queries = self._slices(TrainingChunks(slices, np.array([0, len(slices)])), None)
        ranks = ranks_of_slices(self.side, engine, queries, self.cfg.evaluation)
        return bootstrap(ranking_metrics(ranks, self.cfg.evaluation.ks), num_draws=100, groups=queries.scored_users)

    @property
    def _reach(self) -> SampleLimits:
        return SampleLimits(self.cfg.history.max_length + 1, first_scored=1)

    def _slices(self, slices: TrainingChunks, sampler: NegativeSampler | None) -> RetrievalChunkCollator:
        return RetrievalChunkCollator(
            self._read,
            slices,
            self.cfg.history,
            seed=self._seed,
            sampler=sampler,
            sharing=self.cfg.negatives.sharing,
            use_times=self._use_times,
            inputs=self._inputs,
        )

    def _times(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if not self._dataset.card.has_timestamps:
            raise self.no_windows()
        return self._dataset.rows(np.arange(self._dataset.num_samples)).lists["timestamps_ms"]

    def evaluate(self, engine: EmbeddingEngine, part: Part) -> Evaluation:
        options = self.cfg.evaluation
        queries = RetrievalQueries(
            self._read,
            self._split,
            self.cfg.history,
            part,
            use_times=self._use_times,
            max_targets=options.max_targets,
            inputs=self._inputs,
        )
        measure = CatalogRanker(self.side, engine, queries, options)
        return self._results.evaluation(measure, queries, part, engine.topology)

    def _sampler(self, num_negatives: int) -> NegativeSampler | None:
        """What draws the negatives; none for the whole catalogue. Items that are told by their features, and have no
        training events, are no negatives."""
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
        """(items + 1,) training events of each item."""
        return item_counts(self._dataset, self._split.train_end)

    def item_content(self, engine: EmbeddingEngine, items: NDArray[np.int64]) -> torch.Tensor:
        """(items, model width) as histories hold them. Collective."""
        return self.side.content(engine, items)


def _check_context(cfg: RetrievalTaskConfig, bags: Collection[str]) -> None:
    """Raise a UserError where samples cannot be divided over ranks."""
    mistakes = ErrorCollector()
    reason = backbone_of(cfg.encoder).whole_only(cfg.encoder)
    refused: list[tuple[str, str, Any]] = []
    if reason is not None:
        refused.append((f"{cfg.encoder.kind} needs whole sequences ({reason})", "task.encoder.kind", cfg.encoder.kind))
    if _meets_others(cfg):
        name = "sharing" if cfg.negatives.sharing > 1 else "sampler"
        refused.append(("tokens meet those of others", f"task.negatives.{name}", getattr(cfg.negatives, name)))
    if cfg.inputs.item_features:
        field = "task.inputs.item_features"
        refused.append(("items with features are looked up for whole samples", field, cfg.inputs.item_features))
    if cfg.inputs.user_tokens == "prefix" and cfg.inputs.user_features:
        refused.append(("tokens before a history belong to whole ones", "task.inputs.user_tokens", "prefix"))
    if bags:
        refused.append(("features with several ids are read for whole samples", "task.inputs", sorted(bags)))
    for problem, field, value in refused:
        mistakes.errors.append(whole_samples_only(problem, field, value))
    mistakes.raise_if_any()


def _meets_others(cfg: RetrievalTaskConfig) -> bool:
    """Whether the loss of a token depends on other tokens' targets or negatives."""
    return cfg.loss != "full" and (cfg.negatives.sampler in ("in_batch", "groups") or cfg.negatives.sharing > 1)


def _feature_tables(inputs: RetrievalInputs, like: TableConfig) -> Iterator[TableConfig]:
    """One a feature; what is asked of an event's own and of the next event's is one feature."""
    read: dict[str, tuple[int, list[str]]] = {}
    for column in (*inputs.token_columns, *inputs.item_columns, *inputs.context_columns):
        if column.vocabulary_size:
            name = column.name
            if name.startswith(CONTEXT_PREFIX):
                name = EVENT_PREFIX + name.removeprefix(CONTEXT_PREFIX)
            read.setdefault(name, (column.vocabulary_size, []))[1].append(column.name)
    for place, (name, (num_rows, features)) in enumerate(read.items()):
        yield replace(
            like,
            name=name,
            num_rows=num_rows,
            features=tuple(features),
            seed=like.seed + 1 + place,
            store=StoreConfig(),
            half_features=(),
        )


def _features(cfg: RetrievalTaskConfig) -> tuple[str, ...]:
    """What reads the item table; negatives that are targets of other tokens read nothing."""
    if cfg.loss == "full":
        return "history", "positive", "catalogue"
    draws_targets = cfg.negatives.sampler in ("in_batch", "groups")
    return ("history", "positive") if draws_targets else ("history", "positive", "negative")


def _half(cfg: RetrievalTaskConfig) -> dict[str, Any]:
    """Fields of the item table for negatives that cross in half precision."""
    if cfg.inputs.item_features:
        return {}
    if cfg.negatives.lookup == "full" or "negative" not in _features(cfg):
        return {}
    return {"half_features": ("negative",), "half_dtype": cfg.negatives.lookup}


def _check_enough(num_negatives: int, num_items: int, what: str) -> None:
    if num_items <= num_negatives:
        raise UserError(
            f"needs more than so many {what} to draw from, and there are {num_items}",
            option="task.num_negatives",
            value=num_negatives,
            remedy="take fewer negatives, or the whole catalogue with task.loss=full",
        )


def _check(cfg: RetrievalTaskConfig, dataset: Dataset, use_times: bool) -> None:
    mistakes = ErrorCollector()
    with mistakes.collecting():
        check_slices(cfg.evaluation.slices, dataset, "task.evaluation.slices")
    if use_times and not dataset.card.has_timestamps:
        name = backbone_of(cfg.encoder).times_field or "kind"
        field = f"task.encoder.{name}"
        other = "take another backbone" if name == "kind" else "set it to false"
        mistakes.add(
            "needs timestamps, and the dataset has none",
            option=field,
            value=getattr(cfg.encoder, name),
            remedy=f"{other}, or prepare the data from files with timestamps",
        )
    if cfg.history.max_length != cfg.encoder.max_length:
        mistakes.add(
            f"differs from task.encoder.max_length = {cfg.encoder.max_length}",
            option="task.history.max_length",
            value=cfg.history.max_length,
            remedy="give both the same value",
        )
    if cfg.inputs.item_features and cfg.negatives.lookup != "full":
        mistakes.add(
            "an item with features is looked up once for all that it is",
            option="task.negatives.lookup",
            value=cfg.negatives.lookup,
            remedy="leave it at full, or keep all rows in 16 bits (--tables.items.dtype bfloat16)",
        )
    if (cfg.inputs.actions or cfg.inputs.action_weights) and cfg.history.stochastic_length_alpha is not None:
        mistakes.add(
            "which targets a sample has, and so what it counts, would be known too late",
            option="task.history.stochastic_length_alpha",
            value=cfg.history.stochastic_length_alpha,
            remedy="leave it out, or train on all actions alike",
        )
    mistakes.raise_if_any()


TASK = TaskSpec(
    config=RetrievalTaskConfig,
    make=RetrievalTask,
    store_field="item_store",
    serving="retrieval",
)
