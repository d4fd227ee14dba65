"""Whose a checkpoint is: it names its run, seed, model and course, and is refused where they are others.

run      a random name, made when a folder is first trained into
seed     of initial weights, order, dropout and negatives
model    all else of the config that may not change while a run goes on
course   what else shaped the weights, and from which step on: a resumed run may change it, and is on another course
         from there; what an earlier start had saved of later steps is then no part of the run
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nestrec.base.config import leaves
from nestrec.base.errors import UserError
from nestrec.checkpoint import IDENTITY, Restored
from nestrec.training.config import RunConfig
from nestrec.training.resumption import is_fixed

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


def check_restored(restored: Restored, mine: Identity) -> None:
    """A UserError that names what differs, where a checkpoint is not of this run."""
    saved = identity_of(restored.state)
    check_same_run(saved, mine, restored.path)
    if saved is not None and is_of_another_course(saved, restored.step, mine):
        told = _told(_settings_of(saved.course), _settings_of(mine.at(restored.step).course))
        _refuse(["course"], told or {"course": "has the same settings from other steps on"}, restored.path)


def check_same_run(saved: Identity | None, mine: Identity, path: Path) -> None:
    """Likewise, whatever its course."""
    if saved is not None:
        _refuse(*_differences(saved, mine), path)


def check_kept_elsewhere(saved: Identity, mine: Identity, address: str) -> None:
    """Likewise, before a checkpoint is taken from `training.checkpoint_address`: nothing of it is in the folder yet."""
    kinds, told = _differences(saved, mine)
    if kinds:
        raise UserError(
            f"holds checkpoints of another {' and '.join(kinds)}: {_listed(told)}",
            field="training.checkpoint_address",
            value=address,
            remedy="give this run an address of its own; or, to go on from these, train with their settings into an "
            "empty folder (--output)",
        )


def _differences(saved: Identity, mine: Identity) -> tuple[list[str], dict[str, str]]:
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
        field="checkpoint",
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
