"""A recipe made from a dataset's card and a look at some of its users: task, model, sizes, loss, split and rates.

Each choice has a reason, which is printed and kept with the run. The numbers come from the recipes of public datasets
(docs/recipes.md), which were found on validation parts; what is given on the command line wins over all of it.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np

from nestrec.base.errors import UserError
from nestrec.data.batches import BatchConfig
from nestrec.data.card import Card, Feature, Owner
from nestrec.data.dataset import Dataset
from nestrec.data.samples.ranking import RankingInputConfig
from nestrec.data.samples.retrieval import HistoryConfig
from nestrec.data.samples.retrieval_inputs import RetrievalInputConfig
from nestrec.data.samples.split import SplitConfig
from nestrec.models import HSTUConfig
from nestrec.models.retrieval import SimilarityConfig
from nestrec.pipeline.dense.options import OptimizerConfig
from nestrec.tasks.catalogue_ranks import RetrievalEvaluationConfig
from nestrec.tasks.ranking import RankingTaskConfig
from nestrec.tasks.retrieval import RetrievalTaskConfig
from nestrec.training.config import DataConfig, RunConfig, TrainingConfig
from nestrec.training.recipes.criteo import criteo_dlrm

NAME = "auto"
ChosenT = TypeVar("ChosenT")
TaskKind = Literal["retrieval", "ranking", "rows"]
LOOKED_AT = 4096
"""Users whose events are looked at."""
FULL_LOSS_ITEMS = 20_000
IDLE_SHARE = 0.05
"""Of events without any action from which on a log is one of impressions."""
REPEATED_SHARE = 0.2
LEAST_LABEL_SHARE, MOST_LABELS = 0.005, 3
MOST_CATEGORY_VALUES = 100_000
RARE, RARE_SHARE = 5, 0.3
"""From such a share of rare items on, items are read by their features too."""


@dataclass(frozen=True, slots=True)
class Habits:
    """What the events of some users tell and the card does not."""

    idle: float
    """share of events with no action"""
    repeated: float
    """share of events with an item that the user had before"""
    actions: dict[str, float]
    """share of events with each action"""


@dataclass(slots=True)
class _Reasons:
    """Options in the order in which they were chosen."""

    why: dict[str, str] = field(default_factory=dict)

    def because(self, option: str, value: ChosenT, reason: str) -> ChosenT:
        self.why[option] = f"{value}: {reason}"
        return value


def auto(dataset: Dataset, task: TaskKind | None = None) -> RunConfig:
    """The recipe for a dataset. task: as the user wants it; none to choose."""
    card, reasons = dataset.card, _Reasons()
    if card.kind == "rows":
        base = criteo_dlrm()
        why = {"task.kind": "rows: the dataset holds labelled examples, not histories; a small DLRM reads them"}
        return RunConfig(
            name=NAME,
            task=base.task,
            data=DataConfig(folder=str(dataset.folder)),
            batch=base.batch,
            optimizer=base.optimizer,
            training=base.training,
            reasons=why,
        )
    habits = look_at(dataset)
    kind = task or _task(card, habits, reasons)
    if kind == "rows":
        remedy = "take retrieval or ranking"
        raise UserError("holds histories, no labelled examples", field="task.kind", value=kind, remedy=remedy)
    make = _ranking if kind == "ranking" else _retrieval
    return make(dataset, habits, reasons)


def look_at(dataset: Dataset) -> Habits:
    """The habits of users at even distances."""
    count = min(dataset.num_samples, LOOKED_AT)
    rows = dataset.rows(np.unique(np.linspace(0, dataset.num_samples - 1, count).astype(np.int64)))
    items, offsets = rows.lists["item_ids"]
    user = np.repeat(np.arange(rows.num_rows), np.diff(offsets))
    num_events = max(1, items.size)
    distinct = np.unique(np.stack([user, items]), axis=1).shape[1]
    if "actions" not in rows.lists:
        return Habits(0.0, 1 - distinct / num_events, {})
    actions = rows.lists["actions"][0].astype(np.int64)
    shares = {name: float((actions & bit > 0).mean()) for name, bit in dataset.card.action_bits.items()}
    return Habits(float((actions == 0).mean()), 1 - distinct / num_events, shares)


def _task(card: Card, habits: Habits, reasons: _Reasons) -> TaskKind:
    of_reactions = set(card.action_bits) - {"positive"}
    if of_reactions and card.has_timestamps and habits.idle >= IDLE_SHARE:
        why = f"{habits.idle:.0%} of events have no action, so the log tells what was shown and left alone"
        return reasons.because("task.kind", "ranking", why)
    if not of_reactions:
        why = "events have no actions" if not card.action_bits else "events are ratings, not impressions"
    else:
        why = "events are actions, and what was shown and left alone is not known"
    return reasons.because("task.kind", "retrieval", f"{why}: the next item is what can be learnt")


def _retrieval(dataset: Dataset, habits: Habits, reasons: _Reasons) -> RunConfig:
    card, counts = dataset.card, dataset.card.counts
    per_item = counts.events / max(1, counts.items)
    length = _at_least(card.lengths.p90, (50, 100, 200))
    length = reasons.because(
        "task.history.max_length", length, f"nine of ten users have at most {card.lengths.p90:.0f} events; 200 at most"
    )
    dim = reasons.because(
        "task.encoder.dim", 64 if counts.events < 150_000 else 128, f"{counts.events:,} events (128 from 150,000 on)"
    )
    is_long = counts.events >= 500_000 and card.lengths.mean >= 50
    layers = reasons.because(
        "task.encoder.num_layers",
        4 if is_long else 2,
        "4 for half a million events in histories of 50 and more, else 2",
    )
    dropout = float(np.clip(0.7 - 0.1 * np.log2(max(per_item, 1e-9) / 8), 0.2, 0.6).round(1))
    reasons.because("task.encoder.dropout", dropout, f"{per_item:.0f} events an item; rare items are learnt by heart")
    reasons.because(
        "task.encoder.time_bias", card.has_timestamps, "the log has times" if card.has_timestamps else "no times"
    )
    is_full = counts.items <= FULL_LOSS_ITEMS
    loss: Literal["full", "sampled_softmax"] = "full" if is_full else "sampled_softmax"
    reasons.because("task.loss", loss, f"{counts.items:,} items; all are compared up to {FULL_LOSS_ITEMS:,}")
    negatives = min(512, max(1, counts.items // 2))
    returns = habits.repeated >= REPEATED_SHARE
    seen: Literal["none", "history"] = reasons.because(
        "task.evaluation.filter_seen",
        "none" if returns else "history",
        f"{habits.repeated:.0%} of events return to an item that the user had",
    )
    split = reasons.because("task.split.kind", "leave_one_out", "every user is measured; `time` is what a server meets")
    batch = reasons.because(
        "batch.batch_samples",
        int(np.clip(2 ** int(np.log2(max(counts.users / 60, 1))), 16, 256)),
        f"{counts.users:,} users, about a hundred steps an epoch",
    )
    rate = reasons.because("optimizer.learning_rate", 1e-3, "with Adam, as the public recipes")
    content, rare = _read_features(card, "item"), _rare_share(card)
    content = content if rare >= RARE_SHARE else ()
    if content:
        why = f"{rare:.0%} of items have at most {RARE} events, and are told by what they are"
        reasons.because("task.inputs.item_features", ",".join(content), why)
    return RunConfig(
        name=NAME,
        task=RetrievalTaskConfig(
            inputs=RetrievalInputConfig(item_features=content),
            encoder=HSTUConfig(
                dim=dim,
                head_dim=dim // 2,
                num_heads=2,
                num_layers=layers,
                dropout=dropout,
                max_length=length,
                time_bias=card.has_timestamps,
            ),
            similarity=SimilarityConfig(normalise=not is_full, temperature=1.0 if is_full else 0.05),
            history=HistoryConfig(max_length=length, slide_events=1),
            loss=loss,
            num_negatives=negatives,
            split=SplitConfig(kind=split),  # type: ignore[arg-type]
            evaluation=RetrievalEvaluationConfig(ks=(10, 50), filter_seen=seen),
        ),
        data=DataConfig(folder=str(dataset.folder)),
        batch=BatchConfig(batch_samples=batch),
        optimizer=OptimizerConfig(learning_rate=rate),
        training=_training(reasons, epochs=100, patience=10),
        reasons=reasons.why,
    )


def _ranking(dataset: Dataset, habits: Habits, reasons: _Reasons) -> RunConfig:
    card = dataset.card
    frequent = [name for name, share in habits.actions.items() if LEAST_LABEL_SHARE <= share <= 1 - LEAST_LABEL_SHARE]
    labels = tuple(sorted(frequent, key=lambda name: -habits.actions[name])[:MOST_LABELS])
    if not labels:
        remedy = "prepare it with other actions, or take --task.kind retrieval"
        raise UserError(
            "has no action that is neither rare nor always there", field="task.kind", value="ranking", remedy=remedy
        )
    shares = ", ".join(f"{name} {habits.actions[name]:.1%}" for name in labels)
    reasons.because("task.inputs.labels", ",".join(labels), f"the most frequent actions of events: {shares}")
    events = reasons.because(
        "task.inputs.max_events",
        _at_least(card.lengths.p99, (32, 64, 128)),
        f"99 of 100 users have at most {card.lengths.p99:.0f} events; 128 at most",
    )
    is_longer = card.lengths.p99 > events
    train_on: Literal["last", "all"] = "all" if is_longer else "last"
    reasons.because(
        "task.inputs.train_on",
        train_on,
        "histories are longer than that, and all of their events are learnt from"
        if is_longer
        else "that is nearly all",
    )
    chosen = {owner: _read_features(card, owner) for owner in ("event", "user", "item")}
    for owner, names in chosen.items():
        if names:
            why = f"known before the user reacts, with more than one value and at most {MOST_CATEGORY_VALUES:,}"
            reasons.because(f"task.inputs.{owner}_features", ",".join(names), why)
    dim = reasons.because(
        "task.encoder.dim",
        32 if card.counts.events < 1_000_000 else 64,
        f"{card.counts.events:,} events (64 from a million)",
    )
    reasons.because("task.split.kind", "time", "the last tenth of the events tests, the tenth before validates")
    category = next((f.name for f in card.event_features if f.kind == "category" and f.name in chosen["event"]), "")
    return RunConfig(
        name=NAME,
        task=RankingTaskConfig(
            encoder=HSTUConfig(
                dim=dim, head_dim=dim // 2, num_heads=2, num_layers=2, dropout=0.3, max_length=2 * events
            ),
            inputs=RankingInputConfig(
                labels=labels,
                event_features=chosen["event"],
                user_features=chosen["user"],
                item_features=chosen["item"],
                max_events=events,
                train_on=train_on,
            ),
            split=SplitConfig(kind="time"),
            baseline_category=category,
        ),
        data=DataConfig(folder=str(dataset.folder)),
        batch=BatchConfig(batch_samples=int(np.clip(2 ** int(np.log2(max(card.counts.users / 60, 1))), 16, 256))),
        optimizer=OptimizerConfig(
            learning_rate=reasons.because("optimizer.learning_rate", 1e-3, "with Adam, as the public recipes"),
            weight_decay=1e-2,
        ),
        training=_training(reasons, epochs=20, patience=3),
        reasons=reasons.why,
    )


def _training(reasons: _Reasons, *, epochs: int, patience: int) -> TrainingConfig:
    reasons.because("training.epochs", epochs, f"at most; it ends {patience} validations after the best one")
    return TrainingConfig(epochs=epochs, patience=patience)


def _read_features(card: Card, owner: Owner) -> tuple[str, ...]:
    return tuple(f.name for f in card.features if f.owner == owner and _is_read(f))


def _is_read(feature: Feature) -> bool:
    """A category with one value tells nothing; one with very many is an id of its own."""
    if feature.known == "after" or feature.kind == "text":
        return False
    return feature.kind in ("number", "vector") or 2 < feature.vocabulary_size <= MOST_CATEGORY_VALUES


def _rare_share(card: Card) -> float:
    """Of the items that have events, those with at most five."""
    found = card.popularity_histogram
    rare = sum(count for edge, count in zip(found.edges, found.counts, strict=False) if edge <= RARE)
    return rare / max(1, sum(found.counts))


def _at_least(value: float, choices: tuple[int, ...]) -> int:
    """The smallest choice that holds the value, or the largest."""
    return next((choice for choice in choices if choice >= value), choices[-1])
