"""Identity of a run, and which of its options may change when it resumes.

Whose a checkpoint is: it names its run, seed, model and course, and is refused where they are others.

run      a random name, made when a folder is first trained into
seed     of initial weights, order, dropout and negatives
model    all else of the config that may not change while a run goes on
course   what else shaped the weights, and from which step on: a resumed run may change it, and is on another course
         from there; what an earlier start had saved of later steps is then no part of the run

What may differ when a run is started again on its folder, and what would make it another run.

Which samples form a step is a pure function of the data, the seed and the size of a batch, and the weights are those of
a task: a checkpoint under other ones means nothing. What is left decides how fast, how long or how steeply a run
goes on; it may change, and the change is recorded.
"""

import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from nestrec.base.config import leaves
from nestrec.base.config_values import from_plain
from nestrec.base.errors import CorruptFileError, UserError
from nestrec.checkpoint import IDENTITY, LoadedCheckpoint
from nestrec.data.dataset_card import CARD_FILE, DatasetCard
from nestrec.training.run_config import RunConfig

T = TypeVar("T")
_FIXED = (
    "task.",
    "tables.",
    "batch.batch_samples",
    "batch.batch_tokens",
    "batch.shuffle_block",
    "batch.order",
    "windows.",
    "training.seed",
    "training.dtype",
)
_FREE_IN_TASK = (
    "recompute", "variant", "segment_tokens", "memory_gib", "batch_users", "batch_slices", "batch_rows",
    ".slide_events", ".max_targets", ".baselines", ".ease_max_items", ".slices",
    "store.kind", "store.cache_rows", "store.folder", "store.num_threads", ".store", ".folder", ".cache_rows",
    ".placement",
)  # fmt: skip
"""How a task computes the same thing."""


def read_kept(file: Path, read: Callable[[Any], T]) -> T:
    """Returns what a file of the folder holds; a `CorruptFileError` if that is not JSON, or does not belong into it."""
    return read_json(file.read_bytes, file, read)


def read_json(content: Callable[[], bytes], where: Path | str, read: Callable[[Any], T]) -> T:
    """The same, of a file wherever it is stored."""
    try:
        return read(json.loads(content()))
    except UserError as error:  # about a field of the file, not an option of the command
        problem = str(error)
    except OSError as error:
        problem = error.strerror or str(error)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise CorruptFileError(
        f"cannot be read: {problem}",
        option="RUN",
        value=str(where),
        remedy="undo the change if it was edited; else delete it and start the training of the run again",
    )


def check_same_data(run: Path, card: DatasetCard, *, or_later: bool = False) -> None:
    """Raise a UserError where the run has been trained on other files than those of this dataset.

    or_later: a later generation of it will do, and an earlier one too: ids mean the same in all of them.
    """
    file = run / CARD_FILE
    if not file.exists():
        return
    trained_on = read_kept(file, partial(from_plain, DatasetCard))
    refuse_other_data(trained_on, card, file, or_later=or_later)


def refuse_other_data(trained_on: DatasetCard, card: DatasetCard, where: Path | str, *, or_later: bool) -> None:
    """Raise a UserError if a run was trained on other data than that of `card`. where: the run's own card."""
    if or_later and (card.generation_of(trained_on) or trained_on.generation_of(card)) is not None:
        return
    if _digests(trained_on) != _digests(card):
        raise UserError(
            f"is not the data that this run was trained on ({where}): that had {_size(trained_on)}, this has "
            f"{_size(card)}",
            option="data.folder",
            value=card.name,
            remedy="name the data it was trained on (--data.folder), or train into another folder (--output)",
        )


def is_fixed(name: str) -> bool:
    """Whether a field of the config, by its dotted name, may not change while a run goes on."""
    return name.startswith(_FIXED) and not name.endswith(_FREE_IN_TASK)


def changes_since(before: RunConfig, now: RunConfig, file: Path) -> list[str]:
    """What was changed, in words; a UserError for what may not be changed. file: what `before` was read from."""
    if before.task.kind != now.task.kind:
        raise UserError(
            f"the folder holds a run of the task {before.task.kind!r}, which cannot be resumed with another task",
            option="task.kind",
            value=now.task.kind,
            remedy="train into another folder (--output), or resume the run with its own recipe: nestrec train "
            "RUN/config.json --output RUN",
        )
    changes = []
    for name, old, new in _option_differences(leaves(before), leaves(now)):
        if is_fixed(name):
            raise UserError(
                f"was {old!r} when this run began ({file}), and may not change while it goes on",
                option=name,
                value=new,
                remedy=f"give --{name} {old}, or train into another folder (--output); or undo the change of "
                f"{file.name} if it was edited",
            )
        if not name.startswith(("name", "data.")):
            changes.append(f"{name} was {old!r}, is {new!r}")
    return changes


def _option_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys([*before, *now]):
        old = before.get(name, "not there")
        new = now.get(name, "not there")
        if name.startswith("tables."):  # what is said of a table for the first time changes nothing where it is none
            old = before.get(name)
            new = now.get(name)
        if old != new:
            yield name, old, new


def _digests(card: DatasetCard) -> dict[str, str]:
    return {file.path: file.sha256 for file in card.files}


def _size(card: DatasetCard) -> str:
    return f"{card.counts.users:,} users and {card.counts.events:,} events"


SEED = "training.seed"
# Saves, evaluations and versions are fences, after which schedules that are not exact read anew: part of the course.
_COURSE = (
    "optimizer.", "balance.", "ranks.", "replica_sync.", "pipeline.", "batch.micro_batches", "training.precision",
    "training.checkpoint_every_steps", "training.evaluate_every_epochs", "training.train_only",
    "publish.every_steps", "publish.every_s",
)  # fmt: skip
_MOST_NAMED = 4

Settings = Mapping[str, Any]
"""Dotted names to plain values."""
Course = tuple[tuple[int, Settings], ...]
"""(step, settings that hold after it), in order of step; all of them at first, then those that were changed."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Of a run, or of one of its checkpoints."""

    run: str
    seed: int
    model: Settings
    course: Course = ()

    @staticmethod
    def of(cfg: RunConfig, named: "Identity | None" = None) -> "Identity":
        """named: what the folder of the run says; none where it is new."""
        model = {name: value for name, value in leaves(cfg).items() if is_fixed(name) and name != SEED}
        if cfg.batch.order == "shuffled":  # checkpoints from before there were windows name none
            model = {name: value for name, value in model.items() if not name.startswith(("batch.order", "windows."))}
        usual = {"retrieval": "leave_one_out", "ranking": "time"}.get(cfg.task.kind)
        if usual is not None and model.get("task.split.kind") == usual:  # nor of splits that there was no choice of
            gone = "task.split." if usual == "leave_one_out" else "task.split.kind"
            model = {name: value for name, value in model.items() if not name.startswith(gone)}
        if named is None:
            return Identity(secrets.token_hex(8), cfg.training.seed, model)
        return replace(named, seed=cfg.training.seed, model=model)

    def at(self, step: int) -> "Identity":
        """That of its checkpoint of a step: what was changed there or later is not in it."""
        return replace(self, course=tuple(leg for leg in self.course if leg[0] < step))

    def going_on(self, step: int, cfg: RunConfig, world: int) -> "Identity":
        """The run from a step on, with the settings of `cfg` on so many ranks."""
        now = {name: value for name, value in leaves(cfg).items() if name.startswith(_COURSE)} | {"ranks": world}
        before = self.at(step)
        held = _settings_of(before.course)
        changed = {name: value for name, value in now.items() if name not in held or held[name] != value}
        return replace(before, course=(*before.course, (step, changed))) if changed else before

    def to_plain(self) -> dict[str, Any]:
        course = [[step, dict(settings)] for step, settings in self.course]
        return {"run": self.run, "seed": self.seed, "model": dict(self.model), "course": course}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> "Identity":
        course = tuple((step, settings) for step, settings in plain["course"])
        return Identity(plain["run"], plain["seed"], plain["model"], course)


def identity_of(state: Mapping[str, Any]) -> Identity | None:
    """What the state of a checkpoint names; none of one that was written before checkpoints named anything."""
    return Identity.from_plain(state[IDENTITY]) if IDENTITY in state else None


def is_of_another_course(saved: Identity | None, step: int, mine: Identity) -> bool:
    """Whether a checkpoint of this run is no part of it any more."""
    return saved is not None and saved.course != mine.at(step).course


def check_restored(restored: LoadedCheckpoint, mine: Identity) -> None:
    """A UserError that names what differs, where a checkpoint is not of this run."""
    saved = identity_of(restored.state)
    check_same_run(saved, mine, restored.path)
    if saved is not None and is_of_another_course(saved, restored.step, mine):
        told = _told(_settings_of(saved.course), _settings_of(mine.at(restored.step).course))
        _refuse(["course"], told or {"course": "has the same settings from other steps on"}, restored.path)


def check_same_run(saved: Identity | None, mine: Identity, path: Path) -> None:
    """Likewise, whatever its course."""
    if saved is not None:
        _refuse(*_identity_differences(saved, mine), path)


def check_kept_elsewhere(saved: Identity, mine: Identity, address: str) -> None:
    """Likewise, before a checkpoint is taken from `training.checkpoint_address`: nothing of it is in the folder yet."""
    kinds, told = _identity_differences(saved, mine)
    if kinds:
        raise UserError(
            f"holds checkpoints of another {' and '.join(kinds)}: {_listed(told)}",
            option="training.checkpoint_address",
            value=address,
            remedy="give this run an address of its own; or, to go on from these, train with their settings into an "
            "empty folder (--output)",
        )


def _identity_differences(saved: Identity, mine: Identity) -> tuple[list[str], dict[str, str]]:
    """What differs: run, seed or model; and in which settings, in words."""
    of_both = {
        "run": _told({"run": saved.run}, {"run": mine.run}),
        "seed": _told({SEED: saved.seed}, {SEED: mine.seed}),
        "model": _told(saved.model, mine.model),
    }
    kinds = [kind for kind, told in of_both.items() if told]
    return kinds, {name: text for told in of_both.values() for name, text in told.items()}


def _refuse(kinds: list[str], told: Mapping[str, str], path: Path) -> None:
    if not kinds:
        return
    raise UserError(
        f"the checkpoint is of another {' and '.join(kinds)}: {_listed(told)}",
        option="checkpoint",
        value=str(path),
        remedy="move it out of this run's folder, or train into another one (--output) with its settings; or undo the "
        f"change of {path.parent.parent / 'config.json'} if that was edited",
    )


def _listed(told: Mapping[str, str]) -> str:
    named = [f"{name} {text}" for name, text in list(told.items())[:_MOST_NAMED]]
    named += [f"and {len(told) - _MOST_NAMED} more"] * (len(told) > _MOST_NAMED)
    return "; ".join(named)


def _told(saved: Settings, mine: Settings) -> dict[str, str]:
    names = [name for name in dict.fromkeys([*saved, *mine]) if saved.get(name) != mine.get(name)]
    return {name: f"is {saved.get(name)!r} there, {mine.get(name)!r} here" for name in names}


def _settings_of(course: Course) -> dict[str, Any]:
    """What holds at its end."""
    held: dict[str, Any] = {}
    for _, settings in course:
        held |= settings
    return held
