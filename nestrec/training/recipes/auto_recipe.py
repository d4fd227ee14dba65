"""A recipe made from a dataset's card and a look at some of its users: task, model, sizes, loss, split and rates.

Each choice has a reason, which is printed and kept with the run. The numbers come from the recipes of public datasets
(docs/recipes.md), which were found on validation parts; what is given on the command line wins over all of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NoReturn, TypeVar, cast

import numpy as np

from nestrec.base.errors import UserError
from nestrec.data.batch_loader import BatchConfig
from nestrec.data.dataset import Dataset
from nestrec.data.dataset_card import DatasetCard, Feature, Owner
from nestrec.data.samples.ranking_collator import RankingInputConfig
from nestrec.data.samples.retrieval_collator import HistoryConfig
from nestrec.data.samples.retrieval_inputs import RetrievalInputConfig
from nestrec.data.samples.split import SplitConfig, SplitKind, split_of
from nestrec.models import HSTUConfig
from nestrec.models.heads import SimilarityConfig
from nestrec.pipeline.dense.dense_optimizer import OptimizerConfig
from nestrec.tasks.catalog_ranks import RetrievalEvaluationConfig
from nestrec.tasks.ctr_task import CTRTaskConfig
from nestrec.tasks.ranking_task import RankingTaskConfig
from nestrec.tasks.retrieval_task import RetrievalTaskConfig
from nestrec.training.recipes.dataset_recipes import criteo_dlrm
from nestrec.training.run_config import DataConfig, RunConfig, TrainingConfig

NAME = "auto"
ChosenT = TypeVar("ChosenT")
SequenceTask = Literal["retrieval", "ranking"]
TaskKind = Literal["retrieval", "ranking", "rows"]
OPTIONS_OF: dict[TaskKind, str] = {"retrieval": "demo", "ranking": "ranking", "rows": "criteo_dlrm"}
"""For each task, a recipe that has the same options as the one that `auto` makes."""
LOOKED_AT = 4096
"""Users whose events are looked at."""
FULL_LOSS_ITEMS = 20_000
IDLE_SHARE = 0.05
"""Of events without any action from which on a log is one of impressions."""
REPEATED_SHARE = 0.2
LEAST_LABEL_SHARE = 0.005
MOST_LABELS = 3
MOST_CATEGORY_VALUES = 100_000
SEVERAL_SHARE = 0.05
"""Of events with a less frequent action, those with several, from which on actions are outcomes and not event types."""
TRUE_TEXTS = frozenset({"1", "true", "t", "yes", "y"})
SEEN = frozenset({"view", "views", "viewed", "impression", "impressions", "exposure", "shown", "show"})
"""Actions that mark what a user saw: in such a log, events without any action are not impressions."""
MEANING = {
    "retrieval": "finds items of the whole catalog (/v1/recommend)",
    "ranking": "scores candidates that you provide (/v1/rank)",
}
RARE = 5
RARE_SHARE = 0.3
"""From such a share of rare items on, items are read by their features too."""


@dataclass(frozen=True, slots=True)
class UserBehaviorStats:
    """What the events of some users tell and the card does not."""

    idle: float
    """share of events with no action"""
    repeated: float
    """share of events with an item that the user had before"""
    actions: dict[str, float]
    """share of events with each action"""
    several: float = 0.0
    """share of events with several actions, among those that have another action than the most frequent one"""


@dataclass(slots=True)
class _Reasons:
    """Options in the order in which they were chosen."""

    why: dict[str, str] = field(default_factory=dict)

    def because(self, option: str, value: ChosenT, reason: str) -> ChosenT:
        self.why[option] = f"{value}: {reason}"
        return value


def auto(dataset: Dataset, task: TaskKind | None = None, *, has_own_split: bool = False) -> RunConfig:
    """Returns the recipe for a dataset, which can run on it.

    Args:
        dataset: Prepared data.
        task: The task that the user asked for; none to choose one.
        has_own_split: Whether the user sets options of the split, which is then not checked.

    Raises:
        UserError: If the log is too small, or lacks what the task needs.
    """
    reasons = _Reasons()
    if dataset.card.kind == "rows":
        return _rows(dataset, reasons, has_own_split=has_own_split)
    if task == "rows":
        remedy = "take retrieval or ranking"
        raise UserError("holds histories, no labelled examples", option="task.kind", value=task, remedy=remedy)
    habits = look_at(dataset)
    kind = task
    if kind is None:
        kind, why = _chosen_task(dataset, habits)
        reasons.because("task.kind", kind, why)
    if kind == "ranking":
        _check_labels(dataset.card, habits)
    usual: SplitKind = "time" if kind == "ranking" else "leave_one_out"
    split = usual if has_own_split else _choose_split(dataset, kind, reasons)
    make = _ranking if kind == "ranking" else _retrieval
    return make(dataset, habits, reasons, split)


def task_choice(dataset: Dataset) -> str | None:
    """Describes the task that `auto` chooses for histories, and why; none for rows with labels."""
    if dataset.card.kind == "rows" or not dataset.card.counts.events:
        return None
    kind, why = _chosen_task(dataset, look_at(dataset))
    return f"{kind}: {why}"


def look_at(dataset: Dataset) -> UserBehaviorStats:
    """The habits of users at even distances."""
    count = min(dataset.num_samples, LOOKED_AT)
    rows = dataset.rows(np.unique(np.linspace(0, dataset.num_samples - 1, count).astype(np.int64)))
    items, offsets = rows.lists["item_ids"]
    user = np.repeat(np.arange(rows.num_rows), np.diff(offsets))
    num_events = max(1, items.size)
    distinct = np.unique(np.stack([user, items]), axis=1).shape[1]
    if "actions" not in rows.lists:
        return UserBehaviorStats(0.0, 1 - distinct / num_events, {})
    actions = rows.lists["actions"][0].astype(np.int64)
    has_action = {name: actions & bit > 0 for name, bit in dataset.card.action_bits.items()}
    shares = {name: float(has.mean()) for name, has in has_action.items()}
    num_actions = np.sum(list(has_action.values()), axis=0)
    most = max(shares, key=lambda name: shares[name])
    several = float((num_actions > 1).sum() / max(1, (num_actions > has_action[most]).sum()))
    return UserBehaviorStats(float((actions == 0).mean()), 1 - distinct / num_events, shares, several)


def _chosen_task(dataset: Dataset, habits: UserBehaviorStats) -> tuple[SequenceTask, str]:
    """Ranking if the log has impressions with outcomes and is large enough for it, else retrieval."""
    problem = _why_no_impressions(dataset.card, habits)
    if problem is None:
        if _labels_of(habits) and _possible_split(dataset, "ranking") is not None:
            why = f"{habits.idle:.0%} of events have no action, so the log tells what was shown and left alone"
            return "ranking", f"{MEANING['ranking']}; {why}. --task.kind retrieval {MEANING['retrieval']}"
        problem = "the log is too small to rank"
    other = f". --task.kind ranking {MEANING['ranking']}" if _labels_of(habits) and dataset.card.has_timestamps else ""
    return "retrieval", f"{MEANING['retrieval']}; {problem}{other}"


def _why_no_impressions(card: DatasetCard, habits: UserBehaviorStats) -> str | None:
    """Returns why events are not impressions with outcomes; none if they are."""
    reactions = set(card.action_bits) - {"positive"}
    if not reactions:
        return "events are ratings, not impressions" if card.action_bits else "events have no actions"
    if not card.has_timestamps:
        return "events have no times"
    if habits.idle < IDLE_SHARE:
        return "events are actions, and what was shown and left alone is not known"
    if seen := sorted(reactions & SEEN):
        return f"the action {seen[0]!r} marks what was seen, so events without it are not impressions"
    is_type = len(reactions) > 1 and habits.several < SEVERAL_SHARE
    for column in card.options.get("log", {}).get("actions", {}).values():
        _, _, text = column.partition(":")
        is_type |= bool(text) and text.lower() not in TRUE_TEXTS
    return "actions are types of events, and what was shown and left alone is not known" if is_type else None


def _labels_of(habits: UserBehaviorStats) -> tuple[str, ...]:
    """Returns the most frequent actions that are neither rare nor always there."""
    shares = habits.actions
    frequent = [name for name, share in shares.items() if LEAST_LABEL_SHARE <= share <= 1 - LEAST_LABEL_SHARE]
    return tuple(sorted(frequent, key=lambda name: -shares[name])[:MOST_LABELS])


def _check_labels(card: DatasetCard, habits: UserBehaviorStats) -> None:
    """Raises a `UserError` if the log has nothing that ranking can learn."""
    if _labels_of(habits) and card.has_timestamps:
        return
    shares = ", ".join(f"{name} {share:.1%}" for name, share in habits.actions.items()) or "none"
    times = "" if card.has_timestamps else ", and it has no times"
    raise UserError(
        f"needs times and an action that {LEAST_LABEL_SHARE:.1%} to {1 - LEAST_LABEL_SHARE:.1%} of the events have; "
        f"the log has {shares}{times}",
        option="task.kind",
        value="ranking",
        remedy="prepare it with other actions (--log.actions) and --log.time, or take --task.kind retrieval",
    )


def _split_sizes(dataset: Dataset, split: SplitKind, task: SequenceTask) -> tuple[int, int, int]:
    """Returns the users that train, and the events that validate and test."""
    num_before = 1 if task == "retrieval" else 0  # events before one that retrieval can ask for
    found = split_of(SplitConfig(kind=split), dataset)
    held_out = [found.held_out("valid"), found.held_out("test")]
    valid, test = (int(np.maximum(end - np.maximum(first, num_before), 0).sum()) for first, end in held_out)
    return int((found.train_end > num_before).sum()), valid, test


def _splits_for(dataset: Dataset, task: SequenceTask) -> dict[SplitKind, tuple[int, int, int]]:
    """Returns the sizes of the splits that the dataset allows, the usual one of the task first."""
    order: tuple[SplitKind, ...] = ("leave_one_out", "time") if task == "retrieval" else ("time", "leave_one_out")
    return {kind: _split_sizes(dataset, kind, task) for kind in order if kind != "time" or dataset.card.has_timestamps}


def _possible_split(dataset: Dataset, task: SequenceTask) -> SplitKind | None:
    return next((kind for kind, sizes in _splits_for(dataset, task).items() if min(sizes)), None)


def _choose_split(dataset: Dataset, task: SequenceTask, reasons: _Reasons) -> SplitKind:
    """Chooses the usual split of the task, or the other one if nothing would be left to train or measure on."""
    why = {
        "leave_one_out": "every user is measured; `time` is what a server meets",
        "time": "the last tenth of the events tests, the tenth before validates",
    }
    splits = _splits_for(dataset, task)
    kind = next((kind for kind, sizes in splits.items() if min(sizes)), None)
    if kind is None:
        _raise_too_small(dataset, task, splits)
    usual, *_ = splits
    other = f"; by {usual} {_told(splits[usual])}" if kind != usual else ""
    return reasons.because("task.split.kind", kind, why[kind] + other)


def _raise_too_small(
    dataset: Dataset, task: SequenceTask, splits: Mapping[SplitKind, tuple[int, int, int]]
) -> NoReturn:
    counts = dataset.card.counts
    least = 2 if task == "retrieval" else 1
    longest = int(dataset.lengths.max(initial=0))
    size = f"{counts.users:,} users, {counts.events:,} events, at most {longest:,} per user"
    told = "; ".join(f"by {kind} {_told(sizes)}" for kind, sizes in splits.items())
    remedy = f"add events: one user with {least + 2} is enough"
    if longest >= least:
        remedy += ", or train on all of them without measuring: --task.split.kind none"
    raise UserError(
        f"is too small for {task} ({size}): {told}. Each must be at least 1",
        option="data.folder",
        value=str(dataset.folder),
        remedy=remedy,
    )


def _told(sizes: tuple[int, int, int]) -> str:
    train, valid, test = sizes
    return f"{train:,} users train, {valid:,} events validate and {test:,} test"


def _rows(dataset: Dataset, reasons: _Reasons, *, has_own_split: bool) -> RunConfig:
    base = criteo_dlrm()
    total = dataset.num_samples
    reasons.because("task.kind", "rows", "the dataset holds labelled examples, not histories; a small DLRM reads them")
    task = cast(CTRTaskConfig, base.task)
    if not has_own_split and min(round(total * task.valid_share), round(total * task.test_share)) == 0:
        if total < 3:
            raise UserError(
                f"is too small ({total} rows with labels): one row each must train, validate and test",
                option="data.folder",
                value=str(dataset.folder),
                remedy="prepare at least 3 rows",
            )
        share = reasons.because("task.valid_share", 1 / total, f"one of {total} rows validates and one tests")
        task = replace(task, valid_share=share, test_share=share)
    return RunConfig(
        name=NAME,
        task=task,
        data=DataConfig(folder=str(dataset.folder)),
        batch=base.batch,
        optimizer=base.optimizer,
        training=base.training,
        reasons=reasons.why,
    )


def _retrieval(dataset: Dataset, habits: UserBehaviorStats, reasons: _Reasons, split: SplitKind) -> RunConfig:
    card = dataset.card
    counts = dataset.card.counts
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
    batch = reasons.because(
        "batch.batch_samples",
        int(np.clip(2 ** int(np.log2(max(counts.users / 60, 1))), 16, 256)),
        f"{counts.users:,} users, about a hundred steps an epoch",
    )
    rate = reasons.because("optimizer.learning_rate", 1e-3, "with Adam, as the public recipes")
    content = _read_features(card, "item")
    rare = _rare_share(card)
    content = content if rare >= RARE_SHARE else ()
    if content:
        why = f"{rare:.0%} of items have at most {RARE} events, and are told by what they are"
        reasons.because("task.inputs.item_features", ",".join(content), why)
    if habits.actions:
        reasons.because("task.inputs.actions", "[]", _ignored_actions(habits))
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
            split=SplitConfig(kind=split),
            evaluation=RetrievalEvaluationConfig(ks=(10, 50), filter_seen=seen),
        ),
        data=DataConfig(folder=str(dataset.folder)),
        batch=BatchConfig(batch_samples=batch),
        optimizer=OptimizerConfig(learning_rate=rate),
        training=_training(reasons, epochs=100, patience=10),
        reasons=reasons.why,
    )


def _ignored_actions(habits: UserBehaviorStats) -> str:
    """Returns the reason for not reading actions, with the option that reads the least frequent usual one."""
    *_, example = _labels_of(habits) or habits.actions
    return (
        f"every event is a target, and its actions ({', '.join(habits.actions)}) are ignored; "
        f"--task.inputs.actions {example} trains and measures on events with {example}"
    )


def _ranking(dataset: Dataset, habits: UserBehaviorStats, reasons: _Reasons, split: SplitKind) -> RunConfig:
    card = dataset.card
    labels = _labels_of(habits)
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
            split=SplitConfig(kind=split),
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


def _read_features(card: DatasetCard, owner: Owner) -> tuple[str, ...]:
    return tuple(f.name for f in card.features if f.owner == owner and _is_read(f))


def _is_read(feature: Feature) -> bool:
    """A category with one value tells nothing; one with very many is an id of its own."""
    if feature.known == "after" or feature.kind == "text":
        return False
    return feature.kind in ("number", "vector") or 2 < feature.vocabulary_size <= MOST_CATEGORY_VALUES


def _rare_share(card: DatasetCard) -> float:
    """Of the items that have events, those with at most five."""
    found = card.popularity_histogram
    rare = sum(count for edge, count in zip(found.edges, found.counts, strict=False) if edge <= RARE)
    return rare / max(1, sum(found.counts))


def _at_least(value: float, choices: tuple[int, ...]) -> int:
    """The smallest choice that holds the value, or the largest."""
    return next((choice for choice in choices if choice >= value), choices[-1])
