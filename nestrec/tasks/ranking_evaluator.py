"""Evaluation of ranking models on held-out events, compared with baselines and per slice."""

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
MAX_EVENTS = 50_000_000
"""Maximum number of events of a dataset for baselines, which hold all events in memory."""


@dataclass(frozen=True, slots=True)
class ListwiseScores:
    """Logits of the model if all held-out events of a user are scored at one time, as a list of candidates."""

    events: Ints
    """Indices into the held-out events."""
    logits: Logits
    """Logits of these events, with the shape (events, K) for K labels."""


class RankingEvaluator:
    """Evaluates a ranking model next to baselines, which are fitted once per dataset and split."""

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
        """Create an evaluator.

        Args:
            dataset: The prepared dataset.
            split: Split into training and held-out events.
            labels: Names of the predicted actions.
            baselines: Names of the baselines to fit.
            category: Event feature that the logistic baseline uses; '' for none.
            slices: Names of the slices; see `nestrec.tasks.metrics`.
        """
        self._dataset = dataset
        self._split = split
        self._labels = labels
        self._category = category
        self._slices = slices
        self._notes: list[str] = []
        if dataset.card.counts.events > MAX_EVENTS:
            baselines = ()
            self._notes.append(
                f"baselines are skipped: they hold all events in memory, and the limit is {MAX_EVENTS:,}"
            )
        if BOOSTED in baselines and not is_available():
            baselines = [name for name in baselines if name != BOOSTED]
            self._notes.append(MISSING_PACKAGE)
        self._names = baselines
        self._fitted: dict[tuple[BaselineName, str], Callable[[EventTable], Logits]] = {}
        self._logits: dict[Part, dict[str, Logits]] = {}
        self._metrics: dict[Part, dict[str, dict[str, ConfidenceInterval]]] = {}

    def evaluate(  # noqa: PLR0917
        self,
        part: Part,
        logit_EK: Logits,
        label_EK: Ints,
        user_E: Ints,
        topology: Topology,
        listwise: ListwiseScores | None = None,
    ) -> Evaluation:
        """Evaluate the model's logits of all held-out events of a split. Collective.

        Args:
            part: The split, `valid` or `test`.
            logit_EK: Logits of E events and K labels, ordered by user and event.
            label_EK: Labels of the same events.
            user_E: Users of the same events.
            topology: Ranks of the run.
            listwise: Logits of some users' events scored as a list, if measured.
        """
        # Only the means of validations are used, so a small number of draws suffices; test results are published.
        num_draws = 200 if part == "test" else VALIDATION_DRAWS
        if part not in self._logits:
            self._logits[part] = self._baselines(part, label_EK.shape, topology)
            self._metrics[part] = {
                system: self._measure(logits, label_EK, user_E, num_draws=num_draws)
                for system, logits in self._logits[part].items()
            }
        logits = {"model": logit_EK, **self._logits[part]}
        metrics = {"model": self._measure(logit_EK, label_EK, user_E, num_draws=num_draws)}
        if listwise is not None:
            of = listwise.events
            metrics["model, at once"] = self._measure(listwise.logits, label_EK[of], user_E[of], num_draws=num_draws)
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
        size = f"measured on {len(user_E):,} events of {len(np.unique(user_E)):,} users"
        notes = (*self._notes, *self._one_sided(label_EK), size)
        return Evaluation(part, headline, metrics, details, notes, slices)

    def _one_sided(self, label_EK: Ints) -> list[str]:
        """Return a note for each label whose metrics are undefined because all events have the same value."""
        return [
            f"all {len(label_EK):,} events have the same value of {name!r}: its auc, gauc and ne are undefined"
            for k, name in enumerate(self._labels)
            if len(label_EK) and label_EK[:, k].min() == label_EK[:, k].max()
        ]

    def _measure(
        self, logit_EK: Logits, label_EK: Ints, user_E: Ints, *, num_draws: int
    ) -> dict[str, ConfidenceInterval]:
        metrics: dict[str, ConfidenceInterval] = {}
        for k, label in enumerate(self._labels):
            of_label = binary_metrics(label_EK[:, k], logit_EK[:, k], user_E, num_draws=num_draws)
            metrics |= {f"{metric}/{label}": value for metric, value in of_label.items()}
        return metrics

    def _baselines(self, part: Part, shape: tuple[int, ...], topology: Topology) -> dict[str, Logits]:
        """Fit and score the baselines on the first rank, which holds all events in memory, and share the results."""
        results = {name: np.zeros(shape) for name in self._names}
        if topology.is_first and self._names:
            events, label_AK, train, held_out = self._all_events(part)
            for k, label in enumerate(self._labels):
                for name in self._names:
                    if (name, label) not in self._fitted:
                        fit = self._boosted_trees if name == BOOSTED else self._logistic
                        self._fitted[name, label] = fit(events.select(train), label_AK[train, k])
                    results[name][:, k] = self._fitted[name, label](events.select(held_out))
        return {name: sum_over_ranks(topology, logits) for name, logits in results.items()}

    def _boosted_trees(self, events: EventTable, label: Ints) -> Callable[[EventTable], Logits]:
        if label.min() == label.max():  # the trees need both classes
            return lambda held_out: np.zeros(held_out.times_ms.size)
        return BoostedTrees(events, label).logits

    def _logistic(self, events: EventTable, label: Ints) -> Callable[[EventTable], Logits]:
        column = f"event_{self._category}"
        sizes = {f.column: f.vocabulary_size for f in self._dataset.card.event_features}

        def columns(events: EventTable) -> tuple[Ints, Ints, Ints]:
            item = events.ids["item"]
            return item, events.ids["user"], events.ids[column] if self._category else np.zeros(item.size, np.int64)

        model = LogisticBaseline(
            *columns(events),
            label,
            num_items=self._dataset.num_items + 1,
            num_users=self._dataset.num_samples,
            num_categories=sizes[column] if self._category else 1,
        )
        return lambda held_out: model.logits(*columns(held_out))

    def _all_events(self, part: Part) -> tuple[EventTable, Ints, Ints, Ints]:
        """Return all events, their labels, and the indices of the training events and of the held-out events."""
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
        held_out, _ = slice_index(offsets[:-1] + first, offsets[:-1] + end)
        return EventTable(ids, numbers, rows.lists["timestamps_ms"][0]), label_AK, train, held_out

    def _targets(self, part: Part) -> Targets:
        first, end = self._split.held_out(part)
        users = np.flatnonzero(end > first)
        counts = item_counts(self._dataset, self._split.train_end)
        item = []
        for low, group in self._dataset.scan([ITEM_IDS]):  # includes appended users, who are not in a row group
            items, offsets = group.lists[ITEM_IDS]
            high = low + len(offsets) - 1
            held_out, _ = slice_index(offsets[:-1] + first[low:high], offsets[:-1] + end[low:high])
            item.append(items[held_out])
        num_held_out = (end - first)[users]
        user = np.repeat(users, num_held_out)
        position = np.repeat(first[users], num_held_out) + positions(np.concatenate([[0], np.cumsum(num_held_out)]))
        target_item = np.concatenate(item)
        return Targets(
            item=target_item,
            user=user,
            position=position,
            item_events=counts[target_item],
            user_events=self._split.train_end[user],
        )
