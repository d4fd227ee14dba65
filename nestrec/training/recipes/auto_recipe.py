"""The recipe `auto`: chooses task, model size, loss, split and learning rate from statistics of a dataset.

The statistics come from the dataset card and a sample of users. Each choice has a reason, which is printed and stored
with the run. The values come from the recipes of public datasets (docs/recipes.md), which were tuned on validation
splits; options on the command line override all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NoReturn, TypeVar, cast

import numpy as np

from nestrec.base.errors import UserError
from nestrec.data.batch_loader import BatchConfig
from nestrec.data.dataset import Dataset
from nestrec.data.dataset_card import DatasetCard, Feature, Owner
from nestrec.data.samples.ranking_collator import RankingHistoryConfig, RankingInputConfig
from nestrec.data.samples.retrieval_collator import HistoryConfig
from nestrec.data.samples.retrieval_inputs import RetrievalInputConfig
from nestrec.data.samples.split import SplitConfig, SplitKind, split_dataset
from nestrec.models import HSTUConfig
from nestrec.models.heads import NegativesConfig, SimilarityConfig
from nestrec.pipeline.dense.dense_optimizer import OptimizerConfig
from nestrec.tasks.catalog_ranks import RetrievalEvaluationConfig
from nestrec.tasks.ctr_task import CTRSplitConfig, CTRTaskConfig
from nestrec.tasks.ranking_task import RankingEvaluationConfig, RankingTaskConfig
from nestrec.tasks.retrieval_task import RetrievalTaskConfig
from nestrec.training.recipes.dataset_recipes import criteo_dlrm
from nestrec.training.run_config import DataConfig, RunConfig, TrainingConfig

NAME = "auto"
ChosenT = TypeVar("ChosenT")
SequenceTask = Literal["retrieval", "ranking"]
TaskKind = Literal["retrieval", "ranking", "rows"]
RECIPE_WITH_SAME_OPTIONS: dict[TaskKind, str] = {"retrieval": "demo", "ranking": "ranking", "rows": "criteo_dlrm"}
"""For each task, a recipe with the same options as the result of `auto`."""
NUM_SAMPLED_USERS = 4096
"""Number of users whose events are analyzed."""
FULL_LOSS_ITEMS = 20_000
MIN_NO_ACTION_FRACTION = 0.05
"""Minimum fraction of events without any action for a log to count as a log of impressions."""
MIN_REPEATED_FRACTION = 0.2
MIN_LABEL_FRACTION = 0.005
MAX_LABELS = 3
MAX_CATEGORY_VALUES = 100_000
MIN_MULTI_ACTION_FRACTION = 0.05
"""Minimum fraction of events with several actions, among events with a less frequent action, for actions to count as
outcomes rather than event types."""
TRUE_TEXTS = frozenset({"1", "true", "t", "yes", "y"})
IMPRESSION_ACTIONS = frozenset({"view", "views", "viewed", "impression", "impressions", "exposure", "shown", "show"})
"""Actions that mark impressions: in a log with such an action, events without any action are not impressions."""
TASK_DESCRIPTIONS = {
    "retrieval": "finds items in the full catalog (/v1/recommend)",
    "ranking": "scores candidates that you provide (/v1/rank)",
}
MAX_RARE_EVENTS = 5
MIN_RARE_FRACTION = 0.3
"""Minimum fraction of rare items for which item features are used."""


@dataclass(frozen=True, slots=True)
class UserBehaviorStats:
    """Statistics of the events of some users, which the dataset card does not contain."""

    no_action_fraction: float
    """Fraction of events without any action."""
    repeated_fraction: float
    """Fraction of events whose item occurs earlier in the user's history."""
    action_fractions: dict[str, float]
    """Fraction of events with each action."""
    multi_action_fraction: float = 0.0
    """Fraction of events with several actions, among events with an action other than the most frequent one."""


@dataclass(slots=True)
class _Reasons:
    """Reasons of the chosen options, in the order of the choices."""

    why: dict[str, str] = field(default_factory=dict)

    def choose(self, option: str, value: ChosenT, reason: str) -> ChosenT:
        self.why[option] = f"{value}: {reason}"
        return value


def auto(dataset: Dataset, task: TaskKind | None = None, *, has_own_split: bool = False) -> RunConfig:
    """Choose a run configuration for a dataset.

    Args:
        dataset: Prepared data.
        task: Task that the user requested; None to choose one.
        has_own_split: Whether the user sets options of the split, which is then not checked.

    Returns:
        A configuration that can run on the dataset.

    Raises:
        UserError: If the log is too small, or does not have the columns that the task needs.
    """
    reasons = _Reasons()
    if dataset.card.kind == "rows":
        return _rows(dataset, reasons, has_own_split=has_own_split)
    if task == "rows":
        remedy = "use retrieval or ranking"
        raise UserError("the dataset has histories, not labeled rows", option="task.kind", value=task, remedy=remedy)
    stats = compute_user_stats(dataset)
    kind = task
    if kind is None:
        kind, why = _chosen_task(dataset, stats)
        reasons.choose("task.kind", kind, why)
    if kind == "ranking":
        _check_labels(dataset.card, stats)
    usual: SplitKind = "time" if kind == "ranking" else "leave_one_out"
    split = usual if has_own_split else _choose_split(dataset, kind, reasons)
    make = _ranking if kind == "ranking" else _retrieval
    return make(dataset, stats, reasons, split)


def describe_task_choice(dataset: Dataset) -> str | None:
    """Describe the task that `auto` chooses for histories, and the reason; None for datasets of labeled rows."""
    if dataset.card.kind == "rows" or not dataset.card.counts.events:
        return None
    kind, why = _chosen_task(dataset, compute_user_stats(dataset))
    return f"{kind}: {why}"


def compute_user_stats(dataset: Dataset) -> UserBehaviorStats:
    """Compute statistics of the events of evenly spaced users."""
    count = min(dataset.num_samples, NUM_SAMPLED_USERS)
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
    most_frequent = max(shares, key=lambda name: shares[name])
    several = float((num_actions > 1).sum() / max(1, (num_actions > has_action[most_frequent]).sum()))
    return UserBehaviorStats(float((actions == 0).mean()), 1 - distinct / num_events, shares, several)


def _chosen_task(dataset: Dataset, stats: UserBehaviorStats) -> tuple[SequenceTask, str]:
    """Choose ranking if the log has impressions with outcomes and is large enough, otherwise retrieval."""
    problem = _reason_against_impressions(dataset.card, stats)
    if problem is None:
        if _labels_of(stats) and _possible_split(dataset, "ranking") is not None:
            why = f"{stats.no_action_fraction:.0%} of events have no action, so there are impressions without reaction"
            return (
                "ranking",
                f"{TASK_DESCRIPTIONS['ranking']}; {why}. --task.kind retrieval {TASK_DESCRIPTIONS['retrieval']}",
            )
        problem = "the log is too small to rank"
    other = (
        f". --task.kind ranking {TASK_DESCRIPTIONS['ranking']}"
        if _labels_of(stats) and dataset.card.has_timestamps
        else ""
    )
    return "retrieval", f"{TASK_DESCRIPTIONS['retrieval']}; {problem}{other}"


def _reason_against_impressions(card: DatasetCard, stats: UserBehaviorStats) -> str | None:
    """Return why events are not impressions with outcomes; None if they are."""
    reactions = set(card.action_bits) - {"positive"}
    if not reactions:
        return "events are ratings, not impressions" if card.action_bits else "events have no actions"
    if not card.has_timestamps:
        return "events have no times"
    if stats.no_action_fraction < MIN_NO_ACTION_FRACTION:
        return "events are actions, and impressions without reaction are not logged"
    if seen := sorted(reactions & IMPRESSION_ACTIONS):
        return f"the action {seen[0]!r} marks impressions, so events without it are not impressions"
    is_type = len(reactions) > 1 and stats.multi_action_fraction < MIN_MULTI_ACTION_FRACTION
    for column in card.options.get("log", {}).get("actions", {}).values():
        _, _, text = column.partition(":")
        is_type |= bool(text) and text.lower() not in TRUE_TEXTS
    return "actions are event types, and impressions without reaction are not logged" if is_type else None


def _labels_of(stats: UserBehaviorStats) -> tuple[str, ...]:
    """Return the most frequent actions that are neither rare nor present at almost every event."""
    shares = stats.action_fractions
    frequent = [name for name, share in shares.items() if MIN_LABEL_FRACTION <= share <= 1 - MIN_LABEL_FRACTION]
    return tuple(sorted(frequent, key=lambda name: -shares[name])[:MAX_LABELS])


def _check_labels(card: DatasetCard, stats: UserBehaviorStats) -> None:
    """Raise a UserError if the log has no label or no times for ranking."""
    if _labels_of(stats) and card.has_timestamps:
        return
    shares = ", ".join(f"{name} {share:.1%}" for name, share in stats.action_fractions.items()) or "none"
    times = "" if card.has_timestamps else ", and no times"
    raise UserError(
        f"needs times and an action that {MIN_LABEL_FRACTION:.1%} to {1 - MIN_LABEL_FRACTION:.1%} of the events have; "
        f"the log has {shares}{times}",
        option="task.kind",
        value="ranking",
        remedy="prepare it with other actions (--log.actions) and --log.time, or use --task.kind retrieval",
    )


def _split_sizes(dataset: Dataset, split: SplitKind, task: SequenceTask) -> tuple[int, int, int]:
    """Return the number of training users, validation events and test events of a split."""
    num_before = 1 if task == "retrieval" else 0  # retrieval needs at least one event before a target
    result = split_dataset(SplitConfig(kind=split), dataset)
    held_out = [result.held_out("valid"), result.held_out("test")]
    valid, test = (int(np.maximum(end - np.maximum(first, num_before), 0).sum()) for first, end in held_out)
    return int((result.train_end > num_before).sum()), valid, test


def _splits_for(dataset: Dataset, task: SequenceTask) -> dict[SplitKind, tuple[int, int, int]]:
    """Return the sizes of the splits that the dataset supports, the default split of the task first."""
    order: tuple[SplitKind, ...] = ("leave_one_out", "time") if task == "retrieval" else ("time", "leave_one_out")
    return {kind: _split_sizes(dataset, kind, task) for kind in order if kind != "time" or dataset.card.has_timestamps}


def _possible_split(dataset: Dataset, task: SequenceTask) -> SplitKind | None:
    return next((kind for kind, sizes in _splits_for(dataset, task).items() if min(sizes)), None)


def _choose_split(dataset: Dataset, task: SequenceTask, reasons: _Reasons) -> SplitKind:
    """Choose the default split of the task, or the other one if a part of the default split would be empty."""
    why = {
        "leave_one_out": "every user is evaluated; `time` is closer to serving",
        "time": "the last tenth of the events is for testing, the tenth before it for validation",
    }
    splits = _splits_for(dataset, task)
    kind = next((kind for kind, sizes in splits.items() if min(sizes)), None)
    if kind is None:
        _raise_too_small(dataset, task, splits)
    usual, *_ = splits
    other = f"; by {usual} {_describe_sizes(splits[usual])}" if kind != usual else ""
    return reasons.choose("task.split.kind", kind, why[kind] + other)


def _raise_too_small(
    dataset: Dataset, task: SequenceTask, splits: Mapping[SplitKind, tuple[int, int, int]]
) -> NoReturn:
    counts = dataset.card.counts
    min_events = 2 if task == "retrieval" else 1
    longest = int(dataset.lengths.max(initial=0))
    size = f"{counts.users:,} users, {counts.events:,} events, at most {longest:,} per user"
    description = "; ".join(f"by {kind} {_describe_sizes(sizes)}" for kind, sizes in splits.items())
    remedy = f"add events (one user with {min_events + 2} events is enough)"
    if longest >= min_events:
        remedy += ", or train on all events without evaluation: --task.split.kind none"
    raise UserError(
        f"the dataset is too small for {task} ({size}): {description}. Each must be at least 1",
        option="data.folder",
        value=str(dataset.folder),
        remedy=remedy,
    )


def _describe_sizes(sizes: tuple[int, int, int]) -> str:
    train, valid, test = sizes
    return f"{train:,} training users, {valid:,} validation events and {test:,} test events"


def _rows(dataset: Dataset, reasons: _Reasons, *, has_own_split: bool) -> RunConfig:
    base = criteo_dlrm()
    total = dataset.num_samples
    reasons.choose("task.kind", "rows", "the dataset has labeled rows, not histories; the model is a small DLRM")
    task = cast(CTRTaskConfig, base.task)
    num_held_out = min(round(total * task.split.valid_fraction), round(total * task.split.test_fraction))
    if not has_own_split and num_held_out == 0:
        if total < 3:
            raise UserError(
                f"the dataset is too small ({total} labeled rows): training, validation and test need one row each",
                option="data.folder",
                value=str(dataset.folder),
                remedy="prepare at least 3 rows",
            )
        share = reasons.choose(
            "task.split.valid_fraction", 1 / total, f"one of {total} rows is for validation and one for testing"
        )
        task = replace(task, split=CTRSplitConfig(valid_fraction=share, test_fraction=share))
    return RunConfig(
        name=NAME,
        task=task,
        data=DataConfig(folder=str(dataset.folder)),
        batch=base.batch,
        optimizer=base.optimizer,
        training=base.training,
        reasons=reasons.why,
    )


def _retrieval(dataset: Dataset, stats: UserBehaviorStats, reasons: _Reasons, split: SplitKind) -> RunConfig:
    card = dataset.card
    counts = dataset.card.counts
    per_item = counts.events / max(1, counts.items)
    length = _at_least(card.lengths.p90, (50, 100, 200))
    length = reasons.choose(
        "task.history.max_events",
        length,
        f"90% of users have at most {card.lengths.p90:.0f} events; the maximum is 200",
    )
    dim = reasons.choose(
        "task.encoder.dim", 64 if counts.events < 150_000 else 128, f"{counts.events:,} events (128 from 150,000 on)"
    )
    is_long = counts.events >= 500_000 and card.lengths.mean >= 50
    layers = reasons.choose(
        "task.encoder.num_layers",
        4 if is_long else 2,
        "4 from 500,000 events on if histories have at least 50 events on average, otherwise 2",
    )
    dropout = float(np.clip(0.7 - 0.1 * np.log2(max(per_item, 1e-9) / 8), 0.2, 0.6).round(1))
    reasons.choose("task.encoder.dropout", dropout, f"{per_item:.0f} events per item; the model overfits rare items")
    reasons.choose(
        "task.encoder.time_bias", card.has_timestamps, "the log has times" if card.has_timestamps else "no times"
    )
    is_full = counts.items <= FULL_LOSS_ITEMS
    loss: Literal["full", "sampled_softmax"] = "full" if is_full else "sampled_softmax"
    reasons.choose("task.loss", loss, f"{counts.items:,} items; the full softmax is used up to {FULL_LOSS_ITEMS:,}")
    negatives = min(512, max(1, counts.items // 2))
    has_repeats = stats.repeated_fraction >= MIN_REPEATED_FRACTION
    seen: Literal["none", "history"] = reasons.choose(
        "task.evaluation.filter_seen",
        "none" if has_repeats else "history",
        f"{stats.repeated_fraction:.0%} of events repeat an item of the user's history",
    )
    batch = reasons.choose(
        "batch.batch_size",
        int(np.clip(2 ** int(np.log2(max(counts.users / 60, 1))), 16, 256)),
        f"{counts.users:,} users, about 100 steps per epoch",
    )
    learning_rate = reasons.choose("optimizer.learning_rate", 1e-3, "with Adam, as in the public recipes")
    content = _used_features(card, "item")
    rare = _rare_share(card)
    content = content if rare >= MIN_RARE_FRACTION else ()
    if content:
        why = f"{rare:.0%} of items have at most {MAX_RARE_EVENTS} events, so their features are used too"
        reasons.choose("task.inputs.item_features", ",".join(content), why)
    if stats.action_fractions:
        reasons.choose("task.inputs.target_actions", "[]", _ignored_actions(stats))
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
            similarity=SimilarityConfig(normalize=not is_full, temperature=1.0 if is_full else 0.05),
            history=HistoryConfig(max_events=length, slide_events=1),
            loss=loss,
            negatives=NegativesConfig(num_negatives=negatives),
            split=SplitConfig(kind=split),
            evaluation=RetrievalEvaluationConfig(ks=(10, 50), filter_seen=seen),
        ),
        data=DataConfig(folder=str(dataset.folder)),
        batch=BatchConfig(batch_size=batch),
        optimizer=OptimizerConfig(learning_rate=learning_rate),
        training=_training(reasons, epochs=100, patience=10),
        reasons=reasons.why,
    )


def _ignored_actions(stats: UserBehaviorStats) -> str:
    """Return the reason for ignoring actions, with an example of the option that selects target events by action."""
    *_, example = _labels_of(stats) or stats.action_fractions
    return (
        f"every event is a target, and its actions ({', '.join(stats.action_fractions)}) are ignored; "
        f"--task.inputs.target_actions {example} trains and evaluates on events with {example}"
    )


def _ranking(dataset: Dataset, stats: UserBehaviorStats, reasons: _Reasons, split: SplitKind) -> RunConfig:
    card = dataset.card
    labels = _labels_of(stats)
    shares = ", ".join(f"{name} {stats.action_fractions[name]:.1%}" for name in labels)
    reasons.choose("task.inputs.labels", ",".join(labels), f"the most frequent actions of events: {shares}")
    events = reasons.choose(
        "task.history.max_events",
        _at_least(card.lengths.p99, (32, 64, 128)),
        f"99% of users have at most {card.lengths.p99:.0f} events; the maximum is 128",
    )
    is_longer = card.lengths.p99 > events
    train_on: Literal["last", "all"] = "all" if is_longer else "last"
    reasons.choose(
        "task.inputs.train_events",
        train_on,
        "some histories are longer, and all of their events are trained on"
        if is_longer
        else "it covers nearly all events",
    )
    chosen = {owner: _used_features(card, owner) for owner in ("event", "user", "item")}
    for owner, names in chosen.items():
        if names:
            why = f"known before the user reacts, with more than one value and at most {MAX_CATEGORY_VALUES:,}"
            reasons.choose(f"task.inputs.{owner}_features", ",".join(names), why)
    dim = reasons.choose(
        "task.encoder.dim",
        32 if card.counts.events < 1_000_000 else 64,
        f"{card.counts.events:,} events (64 from 1,000,000 on)",
    )
    category = next((f.name for f in card.event_features if f.kind == "category" and f.name in chosen["event"]), "")
    return RunConfig(
        name=NAME,
        task=RankingTaskConfig(
            encoder=HSTUConfig(
                dim=dim, head_dim=dim // 2, num_heads=2, num_layers=2, dropout=0.3, max_length=2 * events
            ),
            history=RankingHistoryConfig(max_events=events),
            inputs=RankingInputConfig(
                labels=labels,
                event_features=chosen["event"],
                user_features=chosen["user"],
                item_features=chosen["item"],
                train_events=train_on,
            ),
            split=SplitConfig(kind=split),
            evaluation=RankingEvaluationConfig(baseline_category=category),
        ),
        data=DataConfig(folder=str(dataset.folder)),
        batch=BatchConfig(batch_size=int(np.clip(2 ** int(np.log2(max(card.counts.users / 60, 1))), 16, 256))),
        optimizer=OptimizerConfig(
            learning_rate=reasons.choose("optimizer.learning_rate", 1e-3, "with Adam, as in the public recipes"),
            weight_decay=1e-2,
        ),
        training=_training(reasons, epochs=20, patience=3),
        reasons=reasons.why,
    )


def _training(reasons: _Reasons, *, epochs: int, patience: int) -> TrainingConfig:
    reasons.choose("training.epochs", epochs, f"at most; training stops {patience} validations after the best one")
    return TrainingConfig(epochs=epochs, early_stopping_patience=patience)


def _used_features(card: DatasetCard, owner: Owner) -> tuple[str, ...]:
    return tuple(f.name for f in card.features if f.owner == owner and _is_used(f))


def _is_used(feature: Feature) -> bool:
    """Return whether a feature is used: categories need several values, but not as many as an id column."""
    if feature.known == "after" or feature.kind == "text":
        return False
    return feature.kind in ("number", "vector") or 2 < feature.vocabulary_size <= MAX_CATEGORY_VALUES


def _rare_share(card: DatasetCard) -> float:
    """Return the fraction of items with events that have at most `MAX_RARE_EVENTS` events."""
    histogram = card.popularity_histogram
    rare = sum(count for edge, count in zip(histogram.edges, histogram.counts, strict=False) if edge <= MAX_RARE_EVENTS)
    return rare / max(1, sum(histogram.counts))


def _at_least(value: float, choices: tuple[int, ...]) -> int:
    """Return the smallest choice that is not below the value, or the largest choice."""
    return next((choice for choice in choices if choice >= value), choices[-1])
