"""Identity of a run, and the options that may change when it resumes.

Each checkpoint contains the identity of its run and is rejected if it does not match:

run             a random id, created when a folder is first trained into
seed            seed of initial weights, sample order, dropout and negatives
model           all other options that may not change while the run exists
option history  options that influence the weights but may change, with the steps from which they apply. If a resumed
                run changes one, checkpoints that an earlier start saved at later steps no longer belong to the run

The samples of a step are a pure function of the data, the seed and the batch size, and the weights belong to a task; so
checkpoints are invalid under other values of these options. All other options determine how fast or how long a run
trains; they may change, and the change is recorded.
"""

import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from nestrec.artifacts.manifest import digest_of_plain
from nestrec.base.config import leaves, rename_former_leaves
from nestrec.base.config_values import from_plain
from nestrec.base.errors import CorruptFileError, UserError
from nestrec.checkpoint import IDENTITY, LoadedCheckpoint
from nestrec.data.dataset_card import CARD_FILE, DatasetCard
from nestrec.training.run_config import RunConfig

T = TypeVar("T")
_FIXED = (
    "task.",
    "tables.",
    "batch.batch_size",
    "batch.batch_tokens",
    "batch.shuffle_block_size",
    "batch.order",
    "windows.",
    "training.seed",
    "training.weight_dtype",
)
_FREE_IN_TASK = (
    "activation_checkpointing", "loss_variant", "segment_tokens", "max_memory_gib", "evaluation.batch_size",
    ".slide_events", ".max_targets_per_user", ".baselines", ".ease_max_items", ".slices",
    "store.kind", "store.cache_rows", "store.folder", "store.num_threads", ".store", ".store_folder", ".cache_rows",
    ".placement",
)  # fmt: skip
"""Suffixes of task options that change how results are computed, but not the results."""


def read_run_file(file: Path, read: Callable[[Any], T]) -> T:
    """Read a JSON file of a run folder.

    Args:
        file: Path of the file.
        read: Function that converts the decoded JSON.

    Raises:
        CorruptFileError: If the file cannot be read, is not JSON or has unexpected content.
    """
    return read_json(file.read_bytes, file, read)


def read_json(content: Callable[[], bytes], where: Path | str, read: Callable[[Any], T]) -> T:
    """Same as `read_run_file`, but for content from any storage; `where` names it in errors."""
    try:
        return read(json.loads(content()))
    except UserError as error:  # names a field of the file, not an option of the command
        problem = str(error)
    except OSError as error:
        problem = error.strerror or str(error)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise CorruptFileError(
        f"cannot read the file: {problem}",
        option="RUN",
        value=str(where),
        remedy="if the file was edited, undo the change; otherwise delete it and train the run again",
    )


def check_same_data(run: Path, data: Path, card: DatasetCard, *, or_later: bool = False) -> None:
    """Raise a UserError if a run was trained on other files than those of a dataset.

    Args:
        run: Folder of the run.
        data: Folder of the dataset.
        card: Card of the dataset.
        or_later: Whether other generations of the dataset are accepted, whose ids have the same meaning.
    """
    file = run / CARD_FILE
    if not file.exists():
        return
    trained_on = read_run_file(file, partial(from_plain, DatasetCard))
    check_same_card(trained_on, file, data, card, or_later=or_later)


def check_same_card(
    trained_on: DatasetCard, where: Path | str, data: Path, card: DatasetCard, *, or_later: bool
) -> None:
    """Raise a UserError if a run was trained on other data.

    Args:
        trained_on: Card of the data that the run was trained on.
        where: Path of that card, for the error.
        data: Folder of the dataset.
        card: Card of the dataset.
        or_later: Whether other generations of the dataset are accepted, whose ids have the same meaning.
    """
    if or_later and (card.find_generation(trained_on) or trained_on.find_generation(card)) is not None:
        return
    if _digests(trained_on) != _digests(card):
        raise UserError(
            f"this run was trained on other data ({where}): that dataset has {_size(trained_on)}, this one has "
            f"{_size(card)}",
            option="data.folder",
            value=str(data),
            remedy="use the data it was trained on (--data.folder), or train into another folder (--output)",
        )


def is_fixed(name: str) -> bool:
    """Return whether an option, given by its dotted name, must not change when a run resumes."""
    return name.startswith(_FIXED) and not name.endswith(_FREE_IN_TASK)


def changes_since(before: RunConfig, now: RunConfig, file: Path) -> list[str]:
    """Describe the options that changed since the last start.

    Args:
        before: Config of the last start.
        now: Current config.
        file: File that `before` was read from.

    Raises:
        UserError: If an option changed that must not change.
    """
    if before.task.kind != now.task.kind:
        raise UserError(
            f"the folder contains a run of the task {before.task.kind!r}, which cannot be resumed with another task",
            option="task.kind",
            value=now.task.kind,
            remedy="train into another folder (--output), or resume the run with its own recipe: nestrec train "
            "RUN/config.json --output RUN",
        )
    changes = []
    for name, old, new in _option_differences(leaves(before), leaves(now)):
        if is_fixed(name):
            raise UserError(
                f"cannot change when a run resumes: it was {old!r} when this run started ({file})",
                option=name,
                value=new,
                remedy=f"set --{name} {old}, or train into another folder (--output); if {file.name} was edited, undo "
                "the change",
            )
        if not name.startswith(("name", "data.")):
            changes.append(f"{name} was {old!r} and is now {new!r}")
    return changes


def _option_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys([*before, *now]):
        old = before.get(name, "not set")
        new = now.get(name, "not set")
        if name.startswith("tables."):  # naming a table with an option of None changes nothing
            old = before.get(name)
            new = now.get(name)
        if old != new:
            yield name, old, new


def _digests(card: DatasetCard) -> dict[str, str]:
    return {file.path: file.sha256 for file in card.files}


def _size(card: DatasetCard) -> str:
    return f"{card.counts.users:,} users and {card.counts.events:,} events"


SEED = "training.seed"
# Checkpoints, evaluations and versions are fences, which influence the weights under schedules that are not exact.
_TRACKED = (
    "optimizer.", "balance.", "parallel.", "replica_sync.", "pipeline.", "batch.num_micro_batches",
    "training.precision", "training.checkpoint_every_steps", "training.eval_every_epochs", "training.train_only",
    "publish.every_steps", "publish.every_s",
)  # fmt: skip
_MAX_LISTED = 4

Options = Mapping[str, Any]
"""Values of options by dotted name."""
OptionHistory = tuple[tuple[int, Options], ...]
"""(step, options that apply after it), sorted by step; the first entry has all options, later ones the changed ones."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a run or of one of its checkpoints."""

    run: str
    seed: int
    model: Options
    option_history: OptionHistory = ()
    stored: Mapping[str, Any] | None = field(default=None, compare=False)
    """Content of the file that the identity was read from, with the option names of the release that wrote it."""

    @staticmethod
    def of(cfg: RunConfig, saved: "Identity | None" = None) -> "Identity":
        """Return the identity of a config; `saved` is the identity in the run folder, or None for a new run."""
        model = {name: value for name, value in leaves(cfg).items() if is_fixed(name) and name != SEED}
        if cfg.batch.order == "shuffled":  # checkpoints of early releases have no windows
            model = {name: value for name, value in model.items() if not name.startswith(("batch.order", "windows."))}
        usual = {"retrieval": "leave_one_out", "ranking": "time"}.get(cfg.task.kind)
        if usual is not None and model.get("task.split.kind") == usual:  # nor split options
            omitted = "task.split." if usual == "leave_one_out" else "task.split.kind"
            model = {name: value for name, value in model.items() if not name.startswith(omitted)}
        if saved is None:
            return Identity(secrets.token_hex(8), cfg.training.seed, model)
        return replace(saved, seed=cfg.training.seed, model=model)

    def at(self, step: int) -> "Identity":
        """Return the identity of the checkpoint of a step, without options that changed at that step or later."""
        return replace(self, option_history=tuple(entry for entry in self.option_history if entry[0] < step))

    def continued_at(self, step: int, cfg: RunConfig, world: int) -> "Identity":
        """Return the identity after resuming at a step with the options of `cfg` on `world` ranks."""
        now = {name: value for name, value in leaves(cfg).items() if name.startswith(_TRACKED)} | {"ranks": world}
        before = self.at(step)
        current = _latest_options(before.option_history)
        changed = {name: value for name, value in now.items() if name not in current or current[name] != value}
        return replace(before, option_history=(*before.option_history, (step, changed))) if changed else before

    def to_plain(self) -> dict[str, Any]:
        history = [[step, dict(options)] for step, options in self.option_history]
        return {"run": self.run, "seed": self.seed, "model": dict(self.model), "course": history}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> "Identity":
        history = tuple((step, _present_options(options)) for step, options in plain["course"])
        return Identity(plain["run"], plain["seed"], _present_options(plain["model"]), history, stored=plain)

    def digests_at(self, step: int) -> list[str]:
        """Return the digests that versions of a step may contain: the present one first, then that of `stored`.

        The two differ if an earlier release wrote `stored`, because the digest depends on the names of the options.
        """
        digests = [_digest(self.to_plain(), step)]
        return digests if self.stored is None else [*digests, _digest(self.stored, step)]


def _digest(plain: Mapping[str, Any], step: int) -> str:
    """Return the digest of an identity as plain data, without options that changed at `step` or later."""
    history = [entry for entry in plain["course"] if entry[0] < step]
    return digest_of_plain({**plain, "course": history})[:16]


def _present_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by dotted name, with the names that earlier versions used replaced by the present ones."""
    num_ranks = {"ranks": options["ranks"]} if "ranks" in options else {}
    named = {name: value for name, value in options.items() if name not in num_ranks}
    return {**rename_former_leaves(RunConfig, named), **num_ranks}


def identity_of(state: Mapping[str, Any]) -> Identity | None:
    """Return the identity in the state of a checkpoint; None for checkpoints of early releases."""
    return Identity.from_plain(state[IDENTITY]) if IDENTITY in state else None


def is_from_other_run_options(saved: Identity | None, step: int, current: Identity) -> bool:
    """Return whether a checkpoint was saved with other options than this run had at that step."""
    return saved is not None and saved.option_history != current.at(step).option_history


def check_restored(restored: LoadedCheckpoint, current: Identity) -> None:
    """Raise a UserError that lists the differences if a checkpoint does not belong to this run."""
    saved = identity_of(restored.state)
    check_same_run(saved, current, restored.path)
    if saved is not None and is_from_other_run_options(saved, restored.step, current):
        differences = _differences(
            _latest_options(saved.option_history), _latest_options(current.at(restored.step).option_history)
        )
        _reject(["option history"], differences or {"options": "are equal, but apply from other steps"}, restored.path)


def check_same_run(saved: Identity | None, current: Identity, path: Path) -> None:
    """Raise a UserError if a checkpoint belongs to another run, regardless of its option history."""
    if saved is not None:
        _reject(*_identity_differences(saved, current), path)


def check_mirror_identity(saved: Identity, current: Identity, address: str) -> None:
    """Raise a UserError if the mirror belongs to another run, before a checkpoint is downloaded from it."""
    kinds, differences = _identity_differences(saved, current)
    if kinds:
        raise UserError(
            f"contains checkpoints with another {' and '.join(kinds)}: {_summarize(differences)}",
            option="training.checkpoint_mirror",
            value=address,
            remedy="use another mirror for this run; or, to resume from these checkpoints, train with their options "
            "into an empty folder (--output)",
        )


def _identity_differences(saved: Identity, current: Identity) -> tuple[list[str], dict[str, str]]:
    """Return which of run, seed and model differ, and a description of each differing option."""
    by_kind = {
        "run": _differences({"run": saved.run}, {"run": current.run}),
        "seed": _differences({SEED: saved.seed}, {SEED: current.seed}),
        "model": _differences(saved.model, current.model),
    }
    kinds = [kind for kind, differences in by_kind.items() if differences]
    return kinds, {name: text for differences in by_kind.values() for name, text in differences.items()}


def _reject(kinds: list[str], differences: Mapping[str, str], path: Path) -> None:
    if not kinds:
        return
    raise UserError(
        f"the checkpoint has another {' and '.join(kinds)}: {_summarize(differences)}",
        option="checkpoint",
        value=str(path),
        remedy="move it out of the folder of this run, or train with its options into another folder (--output); if "
        f"{path.parent.parent / 'config.json'} was edited, undo the change",
    )


def _summarize(differences: Mapping[str, str]) -> str:
    lines = [f"{name} {text}" for name, text in list(differences.items())[:_MAX_LISTED]]
    lines += [f"and {len(differences) - _MAX_LISTED} more"] * (len(differences) > _MAX_LISTED)
    return "; ".join(lines)


def _differences(saved: Options, current: Options) -> dict[str, str]:
    names = [name for name in dict.fromkeys([*saved, *current]) if saved.get(name) != current.get(name)]
    return {name: f"is {saved.get(name)!r} in the checkpoint and {current.get(name)!r} in this run" for name in names}


def _latest_options(history: OptionHistory) -> dict[str, Any]:
    """Return the options that apply at the end of a history."""
    latest: dict[str, Any] = {}
    for _, options in history:
        latest |= options
    return latest
