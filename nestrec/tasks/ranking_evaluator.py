"""What is said of a ranking model on held-out events: beside its baselines, and on slices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from nestrec.data.dataset import Dataset
from nestrec.data.dataset_schema import ITEM_IDS
from nestrec.data.flat_arrays import positions, slice_index
from nestrec.data.samples.split import Part, Split, item_counts
from nestrec.distributed import Topology
from nestrec.tasks.learned_baselines import MISSING_PACKAGE, BoostedTrees, EventTable, LogisticBaseline, is_available
from nestrec.tasks.metrics import ConfidenceInterval, Targets, binary_metrics, measure_slices, slice_masks
from nestrec.tasks.task import Evaluation, sum_over_ranks

Ints = NDArray[np.int64]
Logits = NDArray[np.float64]
BaselineName = Literal["logistic", "boosted trees"]
BASELINES: tuple[BaselineName, ...] = get_args(BaselineName)
LOGISTIC, BOOSTED = BASELINES
SLICE_DRAWS, VALIDATION_DRAWS = 50, 40
MOST_EVENTS = 50_000_000
"""Of a log with more events no baseline is fitted: they hold all of it in memory."""


@dataclass(frozen=True, slots=True)
class ListwiseScores:
    """What the model says where all held-out events of a user are asked for at one moment."""

    events: Ints
    """places among the held-out events"""
    logits: Logits
    """(events, K)"""


class RankingEvaluator:
    """Baselines of a dataset and split, fitted once a part, and evaluations beside them."""

    def __init__(
        self,
        dataset: Dataset,
        split: Split,
        labels: Sequence[str],
        *,
        baselines: Sequence[BaselineName],
        category: str,
        slices: Sequence[str],
    ):
        """category: event feature that the logistic baseline reads; '' for none. slices: see nestrec.tasks.metrics."""
        self._dataset = dataset
        self._split = split
        self._labels = labels
        self._category = category
        self._slices = slices
        self._notes: list[str] = []
        if dataset.card.counts.events > MOST_EVENTS:
            baselines = ()
            self._notes.append(f"baselines are left out: they hold all events in memory, up to {MOST_EVENTS:,}")
        if BOOSTED in baselines and not is_available():
            baselines = [name for name in baselines if name != BOOSTED]
            self._notes.append(MISSING_PACKAGE)
        self._names = baselines
        self._fitted: dict[tuple[BaselineName, str], Callable[[EventTable], Logits]] = {}
        self._logits: dict[Part, dict[str, Logits]] = {}
        self._metrics: dict[Part, dict[str, dict[str, ConfidenceInterval]]] = {}

    def evaluation(  # noqa: PLR0917
        self,
        part: Part,
        logit_EK: Logits,
        label_EK: Ints,
        user_E: Ints,
        topology: Topology,
        at_once: ListwiseScores | None = None,
    ) -> Evaluation:
        """The model's logits of all held-out events of a part, in the order of users and events. Collective."""
        # A validation is one of many and only its mean decides; the test is the figure that people quote.
        num_draws = 200 if part == "test" else VALIDATION_DRAWS
        if part not in self._logits:
            self._logits[part] = self._baselines(part, label_EK.shape, topology)
            self._metrics[part] = {
                system: self._measure(logits, label_EK, user_E, num_draws=num_draws)
                for system, logits in self._logits[part].items()
            }
        logits = {"model": logit_EK, **self._logits[part]}
        metrics = {"model": self._measure(logit_EK, label_EK, user_E, num_draws=num_draws)}
        if at_once is not None:
            of = at_once.events
            metrics["model, at once"] = self._measure(at_once.logits, label_EK[of], user_E[of], num_draws=num_draws)
        metrics |= self._metrics[part]
        details = {"logit": logit_EK, "label": label_EK, "users": user_E}
        headline = f"auc/{self._labels[0]}"
        if part == "valid":
            return Evaluation(part, headline, metrics, details)
        slices = measure_slices(
            slice_masks(self._slices, self._dataset, self._targets(part)),
            list(logits),
            lambda system, mask: self._measure(
                logits[system][mask], label_EK[mask], user_E[mask], num_draws=SLICE_DRAWS
            ),
        )
        asked = f"measured on {len(user_E):,} events of {len(np.unique(user_E)):,} users"
        notes = (*self._notes, *self._one_sided(label_EK), asked)
        return Evaluation(part, headline, metrics, details, notes, slices)

    def _one_sided(self, label_EK: Ints) -> list[str]:
        """Why some metrics are not known."""
        return [
            f"all {len(label_EK):,} events have {name!r}, or none has: auc, gauc and ne of it cannot be told"
            for k, name in enumerate(self._labels)
            if len(label_EK) and label_EK[:, k].min() == label_EK[:, k].max()
        ]

    def _measure(
        self, logit_EK: Logits, label_EK: Ints, user_E: Ints, *, num_draws: int
    ) -> dict[str, ConfidenceInterval]:
        found: dict[str, ConfidenceInterval] = {}
        for k, label in enumerate(self._labels):
            of_label = binary_metrics(label_EK[:, k], logit_EK[:, k], user_E, num_draws=num_draws)
            found |= {f"{metric}/{label}": value for metric, value in of_label.items()}
        return found

    def _baselines(self, part: Part, shape: tuple[int, ...], topology: Topology) -> dict[str, Logits]:
        """On the first rank alone, which then has all events in memory; the others are given the results."""
        found = {name: np.zeros(shape) for name in self._names}
        if topology.is_first and self._names:
            events, label_AK, train, held = self._all_events(part)
            for k, label in enumerate(self._labels):
                for name in self._names:
                    if (name, label) not in self._fitted:
                        fit = self._boosted if name == BOOSTED else self._logistic
                        self._fitted[name, label] = fit(events.take(train), label_AK[train, k])
                    found[name][:, k] = self._fitted[name, label](events.take(held))
        return {name: sum_over_ranks(topology, logits) for name, logits in found.items()}

    def _boosted(self, events: EventTable, label: Ints) -> Callable[[EventTable], Logits]:
        if label.min() == label.max():  # nothing to tell apart
            return lambda held: np.zeros(held.times_ms.size)
        return BoostedTrees(events, label).logits

    def _logistic(self, events: EventTable, label: Ints) -> Callable[[EventTable], Logits]:
        named = f"event_{self._category}"
        sizes = {f.column: f.vocabulary_size for f in self._dataset.card.event_features}

        def columns(events: EventTable) -> tuple[Ints, Ints, Ints]:
            item = events.ids["item"]
            return item, events.ids["user"], events.ids[named] if self._category else np.zeros(item.size, np.int64)

        model = LogisticBaseline(
            *columns(events),
            label,
            num_items=self._dataset.num_items + 1,
            num_users=self._dataset.num_samples,
            num_categories=sizes[named] if self._category else 1,
        )
        return lambda held: model.logits(*columns(held))

    def _all_events(self, part: Part) -> tuple[EventTable, Ints, Ints, Ints]:
        """All events, their labels, and the places of those that train and of those that are held out."""
        rows = self._dataset.rows(np.arange(self._dataset.num_samples))
        items, offsets = rows.lists["item_ids"]
        user = np.repeat(np.arange(rows.num_rows), np.diff(offsets))
        ids: dict[str, Ints] = {"item": items, "user": user}
        numbers: dict[str, NDArray[np.float64]] = {}
        for feature in self._dataset.card.features:
            if feature.known == "after" or feature.kind not in ("category", "number"):
                continue
            if feature.owner == "item":
                column = self._dataset.items().column(feature.column).to_numpy()
                values = np.concatenate([column[:1] * 0, column])[items]
            else:
                is_event = feature.owner == "event"
                values = rows.lists[feature.column][0] if is_event else rows.scalars[feature.column][user]
            if feature.kind == "category":
                ids[feature.column] = values.astype(np.int64)
            else:
                numbers[feature.column] = values.astype(np.float64)
        actions = rows.lists["actions"][0].astype(np.int64)
        bits = self._dataset.card.action_bits
        label_AK = np.stack([(actions & bits[name] > 0).astype(np.int64) for name in self._labels], axis=1)
        first, end = self._split.held_out(part)
        train, _ = slice_index(offsets[:-1], offsets[:-1] + self._split.train_end)
        held, _ = slice_index(offsets[:-1] + first, offsets[:-1] + end)
        return EventTable(ids, numbers, rows.lists["timestamps_ms"][0]), label_AK, train, held

    def _targets(self, part: Part) -> Targets:
        first, end = self._split.held_out(part)
        users = np.flatnonzero(end > first)
        counts = item_counts(self._dataset, self._split.train_end)
        item = []
        for low, group in self._dataset.scan([ITEM_IDS]):  # appended users too, who are in no row group
            items, offsets = group.lists[ITEM_IDS]
            high = low + len(offsets) - 1
            held, _ = slice_index(offsets[:-1] + first[low:high], offsets[:-1] + end[low:high])
            item.append(items[held])
        num_held = (end - first)[users]
        user = np.repeat(users, num_held)
        place = np.repeat(first[users], num_held) + positions(np.concatenate([[0], np.cumsum(num_held)]))
        found = np.concatenate(item)
        return Targets(
            item=found,
            user=user,
            place=place,
            item_events=counts[found],
            user_events=self._split.train_end[user],
        )
