"""A run that begins where another one stands: with its weights, rows and optimiser state, on the same or later data.

Rows are numbered by ids of the dataset, so the data must be what the other run was trained on, or a later generation of
it: there the ids are the same, and new ones come behind them. Rows of new ids begin from (table seed, key), as always.
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
from nestrec.training.run_identity import read_kept
from nestrec.training.state import TrainState
from nestrec.training.training_session import Session

_REMEDY = "name a run of the same recipe, or train anew without --from"


@dataclass(frozen=True, slots=True)
class WarmStart:
    """A run to begin from, which fits the data and the tables of the new one."""

    run: Path
    name: str
    """what its checkpoints call it"""
    generation: Generation | None
    """of the dataset that it was trained on; none where it is the same data as now"""
    told: tuple[str, ...]
    """what is taken over and what is new, for people"""

    @property
    def after_ms(self) -> int:
        """The first moment of which it has seen nothing; 0 where its data is not older than the new run's."""
        return 0 if self.generation is None else self.generation.last_ms + 1

    @staticmethod
    def of(run: Path, session: Session) -> "WarmStart":
        """Checked against what the new run will be; a UserError where its rows would mean something else."""
        folder = RunFolder(run)
        folder.config()  # raises where it is no run
        card = read_kept(run / CARD_FILE, partial(from_plain, DatasetCard))
        now = session.dataset.card
        generation = now.generation_of(card)
        is_same = card.digest_of_files == now.digest_of_files
        if not is_same and generation is None:
            raise UserError(
                f"was trained on other data, whose ids mean other users and items than those of {now.name!r}",
                option="--from",
                value=str(run),
                remedy="grow the data it was trained on (nestrec append) and name that, or train anew without --from",
            )
        identity = folder.identity()
        sizes = read_kept(run / "parameters.json", _table_sizes)
        told = _told_of_data(card, now) + _told_of_tables(run, session.task.tables, sizes)
        name = "" if identity is None else identity.run
        return WarmStart(run, name, None if is_same else generation, tuple(told))

    def load(self, session: Session, report: Callable[[str], None]) -> tuple[TrainState, list[str]]:
        """Take over its best weights, or its last where nothing was validated; where the new run stands, and a text
        for people. Collective."""
        folder = RunFolder(self.run)
        restored, is_best = RunWeights(folder.config(), folder, session.topology, report=report).restore(best=True)
        before = session.restore(restored)
        session.engine.reads_ahead.forget()  # of batches that will never come
        kind = "best" if is_best else "last"
        which = f"{kind} weights, rows and optimiser state of {self.run} after step {restored.step}"
        state = TrainState(step=before.step, first_step=before.step)
        return state, [f"begins with {which}", *self.told]

    def to_plain(self) -> dict[str, Any]:
        """For the folder of the new run."""
        return {"run": str(self.run.resolve()), "name": self.name, "told": list(self.told)}


def check_same_beginning(folder: RunFolder, beginning: WarmStart | None) -> None:
    """Raise a UserError where a run that goes on was begun from another run than the one that is named now."""
    began = folder.began_from()
    if beginning is not None and began != str(beginning.run.resolve()):
        raise UserError(
            f"this run began {'anew' if began is None else f'from {began}'}, and goes on from its own checkpoints",
            option="--from",
            value=str(beginning.run),
            remedy="leave --from out, or train into another folder (--output)",
        )


def _told_of_data(before: DatasetCard, now: DatasetCard) -> list[str]:
    grown = {
        "users": now.counts.users - before.counts.users,
        "items": now.counts.items - before.counts.items,
        "events": now.counts.events - before.counts.events,
    }
    more = ", ".join(f"{number:,} {what}" for what, number in grown.items() if number)
    return [f"data: generation {now.generation}, with {more} more" if more else "data: the same"]


def _table_sizes(plain: dict[str, Any]) -> dict[str, dict[str, int | None]]:
    return {name: {"rows": table["rows"], "dim": table["dim"]} for name, table in plain["tables"].items()}


def _told_of_tables(
    run: Path, tables: tuple[TableConfig, ...], sizes: Mapping[str, Mapping[str, int | None]]
) -> list[str]:
    told = []
    for table in tables:
        if table.name not in sizes:
            told.append(f"table {table.name}: new")
            continue
        rows, dim = sizes[table.name]["rows"], sizes[table.name]["dim"]
        if dim != table.dim or (rows is None) != (table.num_rows is None):
            kind = "any key" if rows is None else f"{rows:,} rows"
            raise UserError(
                f"has {kind} of {dim} elements in {run}",
                option=f"table {table.name}",
                value=f"{'any key' if table.num_rows is None else table.num_rows} of {table.dim}",
                remedy=_REMEDY,
            )
        if rows is None or table.num_rows is None:
            told.append(f"table {table.name}: taken over; rows of new keys begin as always")
        else:
            new = table.num_rows - rows
            told.append(f"table {table.name}: {rows:,} rows taken over, {new:,} new")
    told += [f"table {name}: left out, this run has none" for name in sizes if name not in {t.name for t in tables}]
    return told
