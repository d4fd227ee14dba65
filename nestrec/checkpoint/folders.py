"""Names of the folders under a run's `checkpoints/`, and which of them may go.

step-00000100             committed; the newest one that verifies is the latest: there is no pointer to go stale
step-00000100.partial     being written
step-00000100.deleted     on its way out
step-00000100.abandoned   set aside: newer than the step that training went on from, or damaged and written again
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from nestrec.base.errors import UserError

_COMMITTED = re.compile(r"step-(\d{8,})")


def folder_of(parent: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return parent / f"step-{step:08d}"


def committed_steps(parent: Path) -> list[int]:
    """Steps with a committed checkpoint, in order; whether they are whole is another question. A UserError where a file
    or a link that leads nowhere has the name: there may be checkpoints that are not found, and none can be saved."""
    if not parent.is_dir():
        if not os.path.lexists(parent):
            return []
        what = f"is a link to {parent.readlink()}, which is not there" if parent.is_symlink() else "is no folder"
        remedy = "mount or mend what it leads to, or move it away to begin without checkpoints"
        raise UserError(f"{what}: checkpoints lie under this name", field="RUN", value=str(parent), remedy=remedy)
    steps = [step_of(path.name) for path in parent.iterdir() if path.is_dir()]
    return sorted(step for step in steps if step is not None)


def step_of(name: str) -> int | None:
    """The step whose checkpoint lies in a folder of this name; none where it is no such folder."""
    match = _COMMITTED.fullmatch(name)
    return int(match[1]) if match and f"step-{int(match[1]):08d}" == name else None


def leftovers(parent: Path) -> list[Path]:
    """What an interrupted save or deletion left behind."""
    return [path for suffix in ("partial", "deleted") for path in parent.glob(f"step-*.{suffix}")]


def steps_to_delete(steps: list[int], keep: int, base_of: Mapping[int, int | None]) -> list[int]:
    """Returns all but the last `keep` steps and what they build on.

    base_of: the base of an incremental checkpoint, or None. If a checkpoint that stays is missing here, because it
    could not be read, all earlier ones stay: it may build on any of them.
    """
    needed: set[int] = set()
    for step in steps[-keep:]:
        ancestor: int | None = step
        while ancestor is not None and ancestor not in needed:
            needed.add(ancestor)
            if ancestor not in base_of:
                needed.update(earlier for earlier in steps if earlier < ancestor)
            ancestor = base_of.get(ancestor)
    return [step for step in steps if step not in needed]
