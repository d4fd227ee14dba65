"""Evaluation of retrieval models on held-out events: compared with baselines, per slice, and by item exposure."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.data.dataset import Dataset
from nestrec.data.flat_arrays import slice_index
from nestrec.data.samples.retrieval_collator import RetrievalQueries
from nestrec.data.samples.split import Part, Split, item_counts
from nestrec.distributed import Topology
from nestrec.tasks.baselines import (
    Baseline,
    EASEBaseline,
    ItemKNNBaseline,
    LastItem,
    Popularity,
    num_pairs,
    recent_popularity,
)
from nestrec.tasks.catalog_ranks import CatalogRanker, RetrievalEvaluationConfig, SystemRanks
from nestrec.tasks.metrics import (
    ConfidenceInterval,
    ExposureCounts,
    Targets,
    bootstrap,
    exposure_metrics,
    measure_slices,
    ranking_metrics,
    slice_masks,
)
from nestrec.tasks.task import Evaluation, sum_over_ranks

MAX_PAIRS = 4e9
"""Maximum number of item pairs that are counted for `item knn` and `ease`; more would take minutes."""
SLICE_DRAWS = 100
MAX_EVENTS = 50_000_000
"""Maximum number of events of a dataset for baselines, which hold all events in memory."""


class RetrievalEvaluator:
    """Evaluates a retrieval model next to baselines, which are fitted once per dataset and split."""

    def __init__(self, dataset: Dataset, split: Split, cfg: RetrievalEvaluationConfig):
        self._dataset = dataset
        self._split = split
        self._cfg = cfg
        self._baselines: dict[Part, dict[str, SystemRanks]] = {}
        self._notes: list[str] = []
        self._trained: NDArray[np.int64] | None = None

    def evaluate(self, measure: CatalogRanker, queries: RetrievalQueries, part: Part, topology: Topology) -> Evaluation:
        """Evaluate the model of a ranker on one split. Collective."""
        if part not in self._baselines:
            self._baselines[part] = self._measured_baselines(measure, len(queries.users), topology)
        ranked = {"model": measure.rank_by_model(), **self._baselines[part]}
        rank = {system: r.rank for system, r in ranked.items()}
        if self._cfg.num_sampled_negatives:
            rank["model, sampled"] = measure.rank_among_sampled()
        # Only the means of validations are used, so a small number of draws suffices; test results are published.
        num_draws = 1000 if part == "test" else 100
        metrics: dict[str, Mapping[str, ConfidenceInterval]] = {
            system: bootstrap(ranking_metrics(r, self._cfg.ks), num_draws=num_draws, groups=queries.users)
            for system, r in rank.items()
        }
        for system, result in ranked.items():
            metrics[system] = {**metrics[system], **exposure_metrics(result.exposure, self._training_counts())}
        details = {"users": queries.users, **{f"rank/{system}": r for system, r in rank.items()}}
        if part == "valid":
            return Evaluation(part, self._cfg.main_metric, metrics, details)
        notes = (*_excluded_targets_note(measure, len(queries.users)), *self._notes, _size_note(queries))
        targets = self._targets(measure, queries)
        details["item_events"] = targets.item_events
        slices = measure_slices(
            slice_masks(self._cfg.slices, self._dataset, targets),
            list(ranked),
            lambda system, mask: bootstrap(
                ranking_metrics(rank[system][mask], self._cfg.ks), num_draws=SLICE_DRAWS, groups=queries.users[mask]
            ),
        )
        return Evaluation(part, self._cfg.main_metric, metrics, details, notes, slices)

    @property
    def _shown(self) -> int:
        return min(self._cfg.ks)

    def training_events(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64] | None]:
        """Return the items of all training events, the offsets of the users, and the times, or None without times."""
        lists = self._dataset.rows(np.arange(self._dataset.num_samples)).lists
        items, offsets = lists["item_ids"]
        index, train_offsets = slice_index(offsets[:-1], offsets[:-1] + self._split.train_end)
        times = lists["timestamps_ms"][0][index] if "timestamps_ms" in lists else None
        return items[index], train_offsets, times

    def _training_counts(self) -> NDArray[np.int64]:
        if self._trained is None:
            self._trained = item_counts(self._dataset, self._split.train_end)
        return self._trained

    def _targets(self, measure: CatalogRanker, queries: RetrievalQueries) -> Targets:
        item = measure.targets()
        return Targets(
            item=item,
            user=queries.users,
            position=queries.target_at,
            item_events=self._training_counts()[item],
            user_events=self._split.train_end[queries.users],
        )

    def _measured_baselines(
        self, measure: CatalogRanker, num_queries: int, topology: Topology
    ) -> dict[str, SystemRanks]:
        """Evaluate the baselines on the first rank, which holds all events in memory, and share the results."""
        factories = self._factories(topology.device)
        num_items = self._dataset.num_items
        results = {}
        for name, make in factories.items():
            ranked = (
                measure.rank_by_baseline(make())
                if topology.is_first
                else SystemRanks(
                    np.zeros(num_queries, np.int64), ExposureCounts(np.zeros(num_items + 1, np.int64), self._shown)
                )
            )
            exposed = ExposureCounts(sum_over_ranks(topology, ranked.exposure.counts), self._shown)
            results[name] = SystemRanks(sum_over_ranks(topology, ranked.rank), exposed)
        return results

    def _factories(self, device: torch.device) -> dict[str, Callable[[], Baseline]]:
        """Return factories of the baselines that can be fitted, and record why others are skipped."""
        num_items = self._dataset.num_items
        cfg = self._cfg
        max_items = cfg.ease_max_items * (4 if device.type == "cuda" else 1)
        pairs = num_pairs(np.concatenate([[0], np.cumsum(self._split.train_end)]))
        too_many_pairs = f"there are {pairs:.1e} pairs of items to count" if pairs > MAX_PAIRS else ""
        too_many_items = f"{num_items:,} items are more than task.evaluation.ease_max_items allows"
        reasons = {
            "recent popularity": "" if self._dataset.card.has_timestamps else "the dataset has no times",
            "item knn": too_many_pairs,
            "ease": too_many_items if num_items > max_items else too_many_pairs,
        }
        self._notes = [f"baseline {n!r} is skipped: {why}" for n, why in reasons.items() if why and n in cfg.baselines]
        if self._dataset.card.counts.events > MAX_EVENTS:
            self._notes = [f"baselines are skipped: they hold all events in memory, and the limit is {MAX_EVENTS:,}"]
            return {}
        available = [name for name in cfg.baselines if not reasons.get(name)]
        return {name: _factory(name, self, device) for name in available}

    def make_baseline(self, name: str, device: torch.device) -> Baseline:
        """Fit a baseline on the training events."""
        items, offsets, times = self.training_events()
        num_items = self._dataset.num_items
        popularity = Popularity(items, self._dataset.num_items)
        if name == "recent popularity":
            assert times is not None
            return recent_popularity(items, times, num_items)
        if name == "last item":
            return LastItem(items, offsets, popularity)
        if name == "item knn":
            return ItemKNNBaseline(items, offsets, num_items, popularity)
        return EASEBaseline(items, offsets, num_items, device) if name == "ease" else popularity


def _factory(name: str, evaluator: RetrievalEvaluator, device: torch.device) -> Callable[[], Baseline]:
    return lambda: evaluator.make_baseline(name, device)


def _size_note(queries: RetrievalQueries) -> str:
    """Return the number of targets and users that the means are computed over."""
    size = f"measured on {len(queries.users):,} targets of {len(np.unique(queries.users)):,} users"
    if not queries.num_skipped:
        return size
    return f"{size}; {queries.num_skipped:,} later targets are omitted (task.evaluation.max_targets_per_user)"


def _excluded_targets_note(measure: CatalogRanker, num_queries: int) -> tuple[str, ...]:
    """Describe targets that cannot be found: if users return to items, they lower every metric."""
    num_excluded = measure.num_excluded_targets()
    if num_excluded == 0:
        return ()
    return (
        f"{num_excluded:,} of {num_queries:,} targets ({num_excluded / num_queries:.1%}) are items that filter_seen "
        "excludes because they are in the user's history: they count as misses for the model and its baselines. "
        "Set --task.evaluation.filter_seen none to recommend them",
    )
