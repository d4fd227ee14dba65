"""What may differ when a run is started again on its folder, and what would make it another run.

Which samples form a step is a pure function of the data, the seed and the size of a batch, and the weights are those of
a task: a checkpoint under other ones means nothing. What is left decides how fast, how long or how steeply a run
goes on; it may change, and the change is recorded.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from nestrec.base.config import from_plain, leaves
from nestrec.base.errors import DamagedError, UserError
from nestrec.data.card import CARD_FILE, Card
from nestrec.training.config import RunConfig

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
    """Returns what a file of the folder holds; a `DamagedError` if that is not JSON, or does not belong into it."""
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
    raise DamagedError(
        f"cannot be read: {problem}",
        field="RUN",
        value=str(where),
        remedy="undo the change if it was edited; else delete it and start the training of the run again",
    )


def check_same_data(run: Path, card: Card, *, or_later: bool = False) -> None:
    """Raise a UserError where the run has been trained on other files than those of this dataset.

    or_later: a later generation of it will do, and an earlier one too: ids mean the same in all of them.
    """
    file = run / CARD_FILE
    if not file.exists():
        return
    trained_on = read_kept(file, partial(from_plain, Card))
    refuse_other_data(trained_on, card, file, or_later=or_later)


def refuse_other_data(trained_on: Card, card: Card, where: Path | str, *, or_later: bool) -> None:
    """Raise a UserError if a run was trained on other data than that of `card`. where: the run's own card."""
    if or_later and (card.generation_of(trained_on) or trained_on.generation_of(card)) is not None:
        return
    if _digests(trained_on) != _digests(card):
        raise UserError(
            f"is not the data that this run was trained on ({where}): that had {_size(trained_on)}, this has "
            f"{_size(card)}",
            field="data.folder",
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
            field="task.kind",
            value=now.task.kind,
            remedy="train into another folder (--output), or resume the run with its own recipe: nestrec train "
            "RUN/config.json --output RUN",
        )
    changes = []
    for name, old, new in _differences(leaves(before), leaves(now)):
        if is_fixed(name):
            raise UserError(
                f"was {old!r} when this run began ({file}), and may not change while it goes on",
                field=name,
                value=new,
                remedy=f"give --{name} {old}, or train into another folder (--output); or undo the change of "
                f"{file.name} if it was edited",
            )
        if not name.startswith(("name", "data.")):
            changes.append(f"{name} was {old!r}, is {new!r}")
    return changes


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name, "not there"), now.get(name, "not there")
        if name.startswith("tables."):  # what is said of a table for the first time changes nothing where it is none
            old, new = before.get(name), now.get(name)
        if old != new:
            yield name, old, new


def _digests(card: Card) -> dict[str, str]:
    return {file.path: file.sha256 for file in card.files}


def _size(card: Card) -> str:
    return f"{card.counts.users:,} users and {card.counts.events:,} events"
