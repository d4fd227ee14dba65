"""What is said of a retrieval model on held-out events: beside its baselines, on slices, and what it shows."""

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

MOST_PAIRS = 4e9
"""Pairs of items of one user that are counted for `item knn` and `ease`; more would take minutes."""
SLICE_DRAWS = 100
MOST_EVENTS = 50_000_000
"""Of a log with more events no baseline is fitted: they hold all of it in memory."""


class RetrievalEvaluator:
    """Baselines of a dataset and split, fitted once, and evaluations beside them."""

    def __init__(self, dataset: Dataset, split: Split, cfg: RetrievalEvaluationConfig):
        self._dataset = dataset
        self._split = split
        self._cfg = cfg
        self._baselines: dict[Part, dict[str, SystemRanks]] = {}
        self._notes: list[str] = []
        self._trained: NDArray[np.int64] | None = None

    def evaluation(
        self, measure: CatalogRanker, queries: RetrievalQueries, part: Part, topology: Topology
    ) -> Evaluation:
        """The model of `measure` on one part. Collective."""
        if part not in self._baselines:
            self._baselines[part] = self._measured_baselines(measure, len(queries.users), topology)
        ranked = {"model": measure.of_model(), **self._baselines[part]}
        rank = {system: r.rank for system, r in ranked.items()}
        if self._cfg.sampled_negatives:
            rank["model, sampled"] = measure.among_sampled()
        # A validation is one of many and only its mean decides; the test is the figure that people quote.
        num_draws = 1000 if part == "test" else 100
        metrics: dict[str, Mapping[str, ConfidenceInterval]] = {
            system: bootstrap(ranking_metrics(r, self._cfg.ks), num_draws=num_draws, groups=queries.users)
            for system, r in rank.items()
        }
        for system, found in ranked.items():
            metrics[system] = {**metrics[system], **exposure_metrics(found.exposed, self._training_counts())}
        details = {"users": queries.users, **{f"rank/{system}": r for system, r in rank.items()}}
        if part == "valid":
            return Evaluation(part, self._cfg.headline, metrics, details)
        notes = (*_barred(measure, len(queries.users)), *self._notes, _asked_for(queries))
        targets = self._targets(measure, queries)
        details["item_events"] = targets.item_events
        slices = measure_slices(
            slice_masks(self._cfg.slices, self._dataset, targets),
            list(ranked),
            lambda system, mask: bootstrap(
                ranking_metrics(rank[system][mask], self._cfg.ks), num_draws=SLICE_DRAWS, groups=queries.users[mask]
            ),
        )
        return Evaluation(part, self._cfg.headline, metrics, details, notes, slices)

    @property
    def _shown(self) -> int:
        return min(self._cfg.ks)

    def training_events(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64] | None]:
        """Items of the training events of all users, the offsets of the users, and times where there are any."""
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
            place=queries.target_at,
            item_events=self._training_counts()[item],
            user_events=self._split.train_end[queries.users],
        )

    def _measured_baselines(
        self, measure: CatalogRanker, num_queries: int, topology: Topology
    ) -> dict[str, SystemRanks]:
        """On the first rank alone, whose events are all in memory; the others are given the results."""
        made = self._makers(topology.device)
        num_items = self._dataset.num_items
        found = {}
        for name, make in made.items():
            ranked = (
                measure.of_baseline(make())
                if topology.is_first
                else SystemRanks(
                    np.zeros(num_queries, np.int64), ExposureCounts(np.zeros(num_items + 1, np.int64), self._shown)
                )
            )
            exposed = ExposureCounts(sum_over_ranks(topology, ranked.exposed.counts), self._shown)
            found[name] = SystemRanks(sum_over_ranks(topology, ranked.rank), exposed)
        return found

    def _makers(self, device: torch.device) -> dict[str, Callable[[], Baseline]]:
        """The baselines that can be fitted here; what cannot is noted, with the reason."""
        num_items = self._dataset.num_items
        cfg = self._cfg
        most_items = cfg.ease_max_items * (4 if device.type == "cuda" else 1)
        pairs = num_pairs(np.concatenate([[0], np.cumsum(self._split.train_end)]))
        reasons = {
            "recent popularity": "" if self._dataset.card.has_timestamps else "the dataset has no times",
            "item knn": f"there are {pairs:.1e} pairs of items to count" if pairs > MOST_PAIRS else "",
            "ease": f"all pairs of {num_items:,} items are more than task.evaluation.ease_max_items allows"
            if num_items > most_items
            else f"there are {pairs:.1e} pairs of items to count"
            if pairs > MOST_PAIRS
            else "",
        }
        self._notes = [f"baseline {n!r} is left out: {why}" for n, why in reasons.items() if why and n in cfg.baselines]
        if self._dataset.card.counts.events > MOST_EVENTS:
            self._notes = [f"baselines are left out: they hold all events in memory, up to {MOST_EVENTS:,}"]
            return {}
        kept = [name for name in cfg.baselines if not reasons.get(name)]
        return {name: _maker(name, self, device) for name in kept}

    def make(self, name: str, device: torch.device) -> Baseline:
        """A baseline by its name, fitted on the training events."""
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


def _maker(name: str, results: RetrievalEvaluator, device: torch.device) -> Callable[[], Baseline]:
    return lambda: results.make(name, device)


def _asked_for(queries: RetrievalQueries) -> str:
    """Over what the means go."""
    asked = f"measured on {len(queries.users):,} targets of {len(np.unique(queries.users)):,} users"
    if not queries.num_left_out:
        return asked
    return f"{asked}; {queries.num_left_out:,} later ones of these users are left out (task.evaluation.max_targets)"


def _barred(measure: CatalogRanker, num_queries: int) -> tuple[str, ...]:
    """Targets that nothing could find: in logs where users return to items they pull every metric down."""
    num_barred = measure.num_barred_targets()
    if num_barred == 0:
        return ()
    return (
        f"{num_barred:,} of {num_queries:,} targets ({num_barred / num_queries:.1%}) are items that filter_seen bars "
        "because the user had them before: they count as misses, for the model and its baselines. "
        "--task.evaluation.filter_seen none lets them be found",
    )
