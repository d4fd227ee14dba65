"""Multi-task ranking over action bits, measured by AUC and normalised entropy on the events after a point in time."""

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
from nestrec.data.flat_arrays import history_start, slice_index, slide_of
from nestrec.data.samples.chunk_collator import RankingChunkCollator
from nestrec.data.samples.ranking_collator import (
    RankingCollator,
    RankingInputConfig,
    RankingInputs,
    checked_columns,
    label_bits,
)
from nestrec.data.samples.split import Part, SplitConfig, split_of
from nestrec.data.samples.time_windows import (
    EventIndex,
    SampleLimits,
    TimeWindow,
    TrainingChunks,
    WindowsConfig,
    held_out_slices,
    past_of,
    slices_of_runs,
    training_slices,
    windows_by_time,
)
from nestrec.embedding import EmbeddingEngine, InitConfig, RowOptimizerConfig, StoreConfig, TableConfig
from nestrec.models.backbone_registry import EncoderConfig, activations_of, backbone_of, flops_of
from nestrec.models.encoder_parts import FeatureProjections, summed
from nestrec.models.heads import HeadConfig, RankingModel, head_width
from nestrec.models.hstu import HSTUConfig
from nestrec.ops.embedding.row_gather import TableRows
from nestrec.pipeline.exchange_window import on_device
from nestrec.tasks.item_tower import FeatureLookup, VectorOf, prefix_vectors
from nestrec.tasks.metrics import ConfidenceInterval, check_slices, user_aucs, weighted_bootstrap, window_metrics
from nestrec.tasks.ranking_evaluator import BASELINES, BaselineName, ListwiseScores, RankingEvaluator
from nestrec.tasks.table_overrides import ResolvedTables, chosen_tables
from nestrec.tasks.task import Evaluation, Task, TaskSpec, TrainingCost, sequence_info, share_of_ranks, sum_over_ranks


@config
class RankingTaskConfig:
    kind: Literal["ranking"] = "ranking"
    """multi-task ranking over action bits"""
    encoder: EncoderConfig = HSTUConfig()
    """the backbone"""
    head: HeadConfig = HeadConfig()
    """from states to logits"""
    inputs: RankingInputConfig = RankingInputConfig()
    """what the model sees and predicts"""
    split: SplitConfig = SplitConfig()
    """which events validate and test"""
    table_init: InitConfig = InitConfig(scale=0.02)
    """first values of all vectors"""
    table_optimizer: RowOptimizerConfig = RowOptimizerConfig(kind="adam", beta2=0.98)
    """row optimiser of all tables"""
    item_store: StoreConfig = StoreConfig()
    """where the item table lives"""
    baseline_category: str = ""
    """event feature that the logistic baseline uses beside the rates of items and users; '' for none"""
    baselines: tuple[BaselineName, ...] = BASELINES
    """systems without a model of their own that are measured beside it; trees need the extra `trees`"""
    slices: tuple[str, ...] = ("items", "users", "history")
    """parts of the events that are measured apart: by how often the item was trained on, by whether the user was, by
    the length of the history, or by a category by its column, such as event_tab"""
    batch_slices: Count = 256
    """slices scored at a time"""
    at_once: Natural = 20_000
    """on the test part, ask for all held-out events of a user at one moment too, before the first of them, as a list is
    ranked: `model, at once` stands beside `model`, which knows how the user reacted to the events before each. Of as
    many users as have so many events, chosen by hashes; 0: of none"""
    windows_at_once: Natural = 0
    """the same of each window of time that is predicted before it is trained on: `gauc_at_once` beside `gauc`. An event
    costs as much as a whole history otherwise does, so a thousand are enough; 0: of none"""


class RankingTask(Task):
    model: RankingModel
    reads_stored_rows = True
    remedy_if_empty = "cut where there are events on both sides: --task.split.valid_from, --task.split.test_from"

    def __init__(self, cfg: RankingTaskConfig, dataset: Dataset, *, seed: int, dtype: Literal["float32", "float64"]):
        self.cfg = cfg
        self._dataset = dataset
        self._seed = seed
        _check(cfg, dataset)
        self._split = split_of(cfg.split, dataset)
        self._results = RankingEvaluator(
            dataset,
            self._split,
            cfg.inputs.labels,
            baselines=cfg.baselines,
            category=cfg.baseline_category,
            slices=cfg.slices,
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
            store=cfg.item_store,
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
        self.take(chosen_tables(self.tables, {}, self.bags))
        self.assembler: Collator = RankingCollator(self._inputs, self._split, cfg.inputs.max_events)
        if cfg.inputs.train_on == "all":
            end = self._split.train_end
            runs = np.stack([np.arange(len(end)), np.zeros_like(end), end], axis=1)
            self.assembler = RankingChunkCollator(
                self._inputs, TrainingChunks(slices_of_runs(runs, cfg.inputs.max_events), None), seed
            )

    def take(self, chosen: ResolvedTables) -> None:
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
        return slide_of(self.cfg.inputs.max_events, self.cfg.inputs.slide_events)

    def _cut_of(self, num_events: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the first token that all layers compute, by number of events including the one that is asked for."""
        encoder = self.cfg.encoder
        num_prefix = len(self._inputs.prefix)
        cut = backbone_of(encoder).cut
        cuts = [cut(encoder, num_prefix + 2 * length) for length in range(self.cfg.inputs.max_events + 1)]
        return np.array(cuts, np.int64)[num_events]

    def cost(self) -> TrainingCost:
        """The layers on two tokens an event, and the head on one of them."""
        layers = flops_of(self.cfg.encoder)
        first = head_width(self.cfg.encoder.dim, self.cfg.head, len(self._features))
        widths = (first, *self.cfg.head.hidden, len(self.cfg.inputs.labels))
        head = 2.0 * sum(a * b for a, b in itertools.pairwise(widths))
        return TrainingCost(
            flops=replace(layers, head=head / 2),
            activations=activations_of(self.cfg.encoder) + sum(widths) / 2,
        )

    def loss(self, batch: MicroBatch, rows: Mapping[str, TableRows], index: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logit_EK = self._forward(batch, lambda feature: self._vectors.of(feature, batch, rows, index))
        label_EK = batch.tensors["label"].to(logit_EK.dtype)
        scored_E = batch.tensors.get("scored")
        weight = None if scored_E is None else scored_E[:, None].to(logit_EK.dtype)
        return binary_cross_entropy_with_logits(logit_EK, label_EK, weight, reduction="sum")

    def _forward(self, batch: MicroBatch, of: VectorOf) -> torch.Tensor:
        """(E, K) logits of the events of a batch."""
        found = {name: of(name) for name in self._features}
        content_ED = summed([vectors for name, vectors in found.items() if name not in self._inputs.prefix])
        prefix_BPD = prefix_vectors(self._inputs.prefix, batch, found.__getitem__, tokens_an_event=2)
        feature_ECD = torch.stack(list(found.values()), dim=1) if self.cfg.head.interactions else None
        action_E = batch.tensors["action"]
        info = sequence_info(batch)
        logits: torch.Tensor = self.model(content_ED, action_E, info, prefix_BPD, feature_ECD)
        return logits

    def windows_by_time(self, cfg: WindowsConfig, start_ms: int) -> list[TimeWindow]:
        times, offsets = self._times()
        return windows_by_time(times, offsets, self._split.train_end, cfg, start_ms)

    def take_windows(self, windows: Sequence[TimeWindow], past: EventIndex | None, *, replay_share: float) -> None:
        past = past or past_of(*self._times())
        reach = SampleLimits(self.cfg.inputs.max_events, first_scored=0)
        slices = training_slices(windows, reach, past, seed=self._seed, replay_share=replay_share)
        self.assembler = RankingChunkCollator(self._inputs, slices, self._seed)

    def predict(self, engine: EmbeddingEngine, window: TimeWindow) -> dict[str, ConfidenceInterval]:
        """AUC, GAUC, NDCG and normalised entropy of each label, the model knowing the reactions to the events of the
        window before each; GAUC without them where it is asked for."""
        logit_EK, label_EK, user_E = self._scores(engine, slices_of_runs(window.runs, self.cfg.inputs.max_events))
        found: dict[str, ConfidenceInterval] = {}
        for k, name in enumerate(self.cfg.inputs.labels):
            found |= {f"{m}/{name}": v for m, v in window_metrics(label_EK[:, k], logit_EK[:, k], user_E).items()}
        if self.cfg.windows_at_once:
            of = self._asked_at_once(engine, window.runs, self.cfg.windows_at_once)
            for k, name in enumerate(self.cfg.inputs.labels):
                aucs = user_aucs(label_EK[of.events, k], of.logits[:, k], user_E[of.events])
                found[f"gauc_at_once/{name}"] = weighted_bootstrap(*aucs)
        return found

    def _times(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return self._dataset.rows(np.arange(self._dataset.num_samples)).lists["timestamps_ms"]

    def evaluate(self, engine: EmbeddingEngine, part: Part) -> Evaluation:
        slices = held_out_slices(self._split, part, self.cfg.inputs.max_events, self._slide_events, self._cut_of)
        logit_EK, label_EK, user_E = self._scores(engine, slices)
        at_once = None
        if part == "test" and self.cfg.at_once:
            first, end = self._split.held_out(part)
            runs = np.stack([np.arange(len(first)), first, end], axis=1)
            at_once = self._asked_at_once(engine, runs, self.cfg.at_once)
        return self._results.evaluation(part, logit_EK, label_EK, user_E, engine.topology, at_once)

    def _asked_at_once(self, engine: EmbeddingEngine, runs: NDArray[np.int64], most: int) -> ListwiseScores:
        """Logits of events of some users, each with the history before the first of its run.

        runs: (R, 3) rows (user, first, end).
        """
        user_R, first_R, end_R = runs.T
        places, _ = slice_index(first_R, end_R)
        run_E = np.repeat(np.arange(len(runs)), end_R - first_R)
        asked = np.flatnonzero(_first_users(user_R, end_R - first_R, most)[run_E])
        logits = np.zeros((len(asked), len(self.cfg.inputs.labels)))
        topology = engine.topology
        longest = self.cfg.inputs.max_events - 1
        start_R = history_start(first_R, longest, self._slide_events)
        for chosen in share_of_ranks(np.arange(len(asked)), self.cfg.batch_slices, topology.rank, topology.world):
            of = run_E[asked[chosen]]
            first = first_R[of]
            before = start_R[of]
            batch = self._inputs.asked(self._inputs.read(user_R[of]), before, first, places[asked[chosen]])
            logits[chosen] = self._logits(engine, batch)[np.cumsum(first - before + 1) - 1]
        return ListwiseScores(asked, sum_over_ranks(topology, logits))

    def _scores(
        self, engine: EmbeddingEngine, slices: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
        """Logits and labels (E, K) and users (E,) of every scored event, in the order of the slices."""
        num_scored = slices[:, 2] - slices[:, 3]
        place_of = np.concatenate([[0], np.cumsum(num_scored)])
        num_tasks = len(self.cfg.inputs.labels)
        logits, labels = np.zeros((place_of[-1], num_tasks)), np.zeros((place_of[-1], num_tasks), dtype=np.int64)
        topology = engine.topology
        for chosen in share_of_ranks(np.arange(len(slices)), self.cfg.batch_slices, topology.rank, topology.world):
            user, slice_first, slice_end, scored_from = slices[chosen].T
            batch = self._inputs.slices(self._inputs.read(user), slice_first, slice_end, epoch=0)
            logit_EK = self._logits(engine, batch)
            scored, counts = slice_index(scored_from - slice_first, slice_end - slice_first)
            event_offsets = np.concatenate([[0], np.cumsum(slice_end - slice_first)])
            at = scored + np.repeat(event_offsets[:-1], np.diff(counts))
            place, _ = slice_index(place_of[chosen], place_of[chosen + 1])
            logits[place] = logit_EK[at]
            labels[place] = batch.tensors["label"].numpy()[at]
        users = np.repeat(slices[:, 0], num_scored)
        return sum_over_ranks(topology, logits), sum_over_ranks(topology, labels), users

    def _logits(self, engine: EmbeddingEngine, batch: MicroBatch) -> NDArray[np.float64]:
        vectors = engine.lookup_readonly(batch.keys)
        if batch.num_tokens == 0:
            return np.zeros((0, len(self.cfg.inputs.labels)))
        moved = on_device(batch, engine.device)
        self.model.eval()
        with torch.no_grad():
            logits = self._forward(moved, lambda feature: self._vectors.of_looked_up(feature, moved, vectors))
        self.model.train()
        return logits.double().cpu().numpy()

    def item_content(self, engine: EmbeddingEngine, items: NDArray[np.int64]) -> torch.Tensor:
        """(items, model width) what the content of an event has of its item: all but event and user. A head that reads
        interactions needs them apart: of the id, then of each feature, one after the other. Collective."""
        batch = self._inputs.of_items(items)
        vectors = engine.lookup_readonly(batch.keys)
        moved = on_device(batch, engine.device)
        with torch.no_grad():
            of_item = [name for name in self._features if name == "item" or name.startswith(ITEM_PREFIX)]
            found = [self._vectors.of_looked_up(name, moved, vectors) for name in of_item]
            return torch.cat(found, dim=1) if self.cfg.head.interactions else summed(found)


def _first_users(user_R: NDArray[np.int64], num_events_R: NDArray[np.int64], most: int) -> NDArray[np.bool_]:
    """Users in an order of hashes, as many as have at most so many events together, and one at least."""
    order = np.argsort(mix64_array(user_R))
    order = order[num_events_R[order] > 0]
    is_in = np.zeros(len(user_R), np.bool_)
    is_in[order[: max(1, int((np.cumsum(num_events_R[order]) <= most).sum()))]] = True
    return is_in


def _check(cfg: RankingTaskConfig, dataset: Dataset) -> None:
    """All that a dataset cannot give, at once."""
    card = dataset.card
    mistakes = ErrorCollector()
    with mistakes.collecting():
        if not card.has_timestamps or not card.action_bits:
            raise UserError(
                "ranking needs timestamps and actions",
                option="data.folder",
                value=str(dataset.folder),
                remedy="prepare the data from a log that has both (--log.time, --log.actions)",
            )
        if not cfg.inputs.labels:
            remedy = did_you_mean("", card.action_bits)
            raise UserError(
                "names nothing to predict", option="task.inputs.labels", value=cfg.inputs.labels, remedy=remedy
            )
        label_bits(card, cfg.inputs)
    with mistakes.collecting():
        check_slices(cfg.slices, dataset, "task.slices")
    with mistakes.collecting():
        checked_columns(card, cfg.inputs)
    categories = [feature.name for feature in card.event_features if feature.kind == "category"]
    if cfg.baseline_category and cfg.baseline_category not in categories:
        mistakes.add(
            "is no category of the dataset's events",
            option="task.baseline_category",
            value=cfg.baseline_category,
            remedy=f"{did_you_mean(cfg.baseline_category, categories)}; '' does without one",
        )
    if 2 * cfg.inputs.max_events != cfg.encoder.max_length:
        mistakes.add(
            f"must be twice task.inputs.max_events = {cfg.inputs.max_events}",
            option="task.encoder.max_length",
            value=cfg.encoder.max_length,
            remedy="an event gives two tokens",
        )
    mistakes.raise_if_any()


TASK = TaskSpec(
    config=RankingTaskConfig,
    make=RankingTask,
    store_field="item_store",
    serving="ranking",
)
