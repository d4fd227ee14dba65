"""Warm start (fine-tuning): initializes a run with the weights, embedding rows and optimizer state of another run.

Rows are addressed by dataset ids, so the dataset must be the one the other run was trained on or a later generation of
it, in which ids keep their meaning and new ids are appended. Rows of new ids get their usual initial values, a function
of (table seed, key).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nestrec.base.config_values import from_plain
from nestrec.base.errors import UserError
from nestrec.data.dataset_card import CARD_FILE, DatasetCard, Generation
from nestrec.embedding import TableConfig
from nestrec.training.run_checkpointer import RunWeights
from nestrec.training.run_folder import RunFolder
from nestrec.training.run_identity import read_run_file
from nestrec.training.state import TrainState
from nestrec.training.training_session import Session

_REMEDY = "use a run of the same recipe, or train without --warm-start"


@dataclass(frozen=True, slots=True)
class WarmStart:
    """A run to start from, checked against the data and tables of the new run."""

    run: Path
    name: str
    """Id of the run in its checkpoints."""
    generation: Generation | None
    """Dataset generation that it was trained on; None if the new run uses the same data."""
    notes: tuple[str, ...]
    """Descriptions of the data and tables that are loaded or new."""

    @property
    def first_new_ms(self) -> int:
        """First time after its training data, in Unix milliseconds; 0 if the new run uses the same data."""
        return 0 if self.generation is None else self.generation.last_ms + 1

    @staticmethod
    def of(run: Path, session: Session) -> "WarmStart":
        """Check a run against the session of a new run.

        Raises:
            UserError: If the data or the tables do not match.
        """
        folder = RunFolder(run)
        folder.config()  # raises a UserError if it is not the folder of a run
        card = read_run_file(run / CARD_FILE, partial(from_plain, DatasetCard))
        now = session.dataset.card
        generation = now.find_generation(card)
        is_same = card.digest_of_files == now.digest_of_files
        if not is_same and generation is None:
            raise UserError(
                f"this run was trained on other data, whose ids differ from those of {now.name!r}",
                option="--warm-start",
                value=str(run),
                remedy="use the data it was trained on, extended by nestrec append, or train without --warm-start",
            )
        identity = folder.identity()
        sizes = read_run_file(run / "parameters.json", _table_sizes)
        notes = _describe_data(card, now) + _describe_tables(run, session.task.tables, sizes)
        name = "" if identity is None else identity.run
        return WarmStart(run, name, None if is_same else generation, tuple(notes))

    def load(self, session: Session, report: Callable[[str], None]) -> tuple[TrainState, list[str]]:
        """Load its best weights, or the last ones if it was not validated. Collective.

        Args:
            session: Session of the new run.
            report: Called with warnings.

        Returns:
            The initial state of the new run, and descriptions of what was loaded.
        """
        folder = RunFolder(self.run)
        restored, is_best = RunWeights(folder.config(), folder, session.topology, report=report).restore(best=True)
        before = session.restore(restored)
        session.engine.prefetched_rows.clear()  # they belong to batches of the other run
        kind = "best" if is_best else "last"
        source = f"{kind} weights, embedding rows and optimizer state of {self.run} after step {restored.step}"
        state = TrainState(step=before.step, first_step=before.step)
        return state, [f"warm start from the {source}", *self.notes]

    def to_plain(self) -> dict[str, Any]:
        """Return the JSON representation for the folder of the new run."""
        return {"run": str(self.run.resolve()), "name": self.name, "notes": list(self.notes)}


def check_same_warm_start(folder: RunFolder, warm_start: WarmStart | None) -> None:
    """Raise a UserError if a resumed run was warm-started from another run than the one in the command."""
    source = folder.warm_start_source()
    if warm_start is not None and source != str(warm_start.run.resolve()):
        raise UserError(
            f"{folder.path} was started {'without a warm start' if source is None else f'from {source}'} and resumes "
            "from its own checkpoints",
            option="--warm-start",
            value=str(warm_start.run),
            remedy="remove --warm-start, or train into another folder (--output)",
        )


def _describe_data(before: DatasetCard, now: DatasetCard) -> list[str]:
    added = {
        "users": now.counts.users - before.counts.users,
        "items": now.counts.items - before.counts.items,
        "events": now.counts.events - before.counts.events,
    }
    more = ", ".join(f"{number:,} {unit}" for unit, number in added.items() if number)
    return [f"data: generation {now.generation}, with {more} more" if more else "data: unchanged"]


def _table_sizes(plain: dict[str, Any]) -> dict[str, dict[str, int | None]]:
    return {name: {"rows": table["rows"], "dim": table["dim"]} for name, table in plain["tables"].items()}


def _describe_tables(
    run: Path, tables: tuple[TableConfig, ...], sizes: Mapping[str, Mapping[str, int | None]]
) -> list[str]:
    notes = []
    for table in tables:
        if table.name not in sizes:
            notes.append(f"table {table.name}: new")
            continue
        rows, dim = sizes[table.name]["rows"], sizes[table.name]["dim"]
        if dim != table.dim or (rows is None) != (table.num_rows is None):
            kind = "any key" if rows is None else f"{rows:,} rows"
            raise UserError(
                f"the table has {kind} with {dim} elements in {run}",
                option=f"table {table.name}",
                value=f"{'any key' if table.num_rows is None else table.num_rows} of {table.dim}",
                remedy=_REMEDY,
            )
        if rows is None or table.num_rows is None:
            notes.append(f"table {table.name}: loaded; rows of new keys get their usual initial values")
        else:
            new = table.num_rows - rows
            notes.append(f"table {table.name}: {rows:,} rows loaded, {new:,} new")
    notes += [
        f"table {name}: skipped, because this run does not have it"
        for name in sizes
        if name not in {t.name for t in tables}
    ]
    return notes
