"""What a run says of the tables of its task, each by its name; what it does not say stays as the task has it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from nestrec.base.config import config
from nestrec.base.errors import Mistakes, UserError, did_you_mean
from nestrec.embedding import TableConfig


@config
class TableOptions:
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """type of the rows' weights; 16 bits take half the memory and half the bytes between ranks, are rounded by chance
    after each update, and keep optimiser state in float32. none: as training.dtype"""

    def of(self, table: TableConfig, where: str) -> TableConfig:
        """The table as these options want it. where: what holds them, for errors."""
        if self.dtype is None:
            return table
        if table.dtype == "float64":
            raise UserError(
                "training.dtype = 'float64' asks for rows of the same",
                field=f"{where}.dtype",
                value=self.dtype,
                remedy="leave it out, or train in float32",
            )
        return replace(table, dtype=self.dtype)


def with_options(tables: Sequence[TableConfig], options: Mapping[str, TableOptions]) -> tuple[TableConfig, ...]:
    """The tables of a task as a run wants them; a UserError that names every mistake."""
    names, mistakes = [table.name for table in tables], Mistakes()
    for name in options:
        with mistakes.noted():
            if name not in names:
                remedy = f"{did_you_mean(name, names)} The task has {', '.join(names)}"
                raise UserError("is no table of this task", field=f"tables.{name}", value=name, remedy=remedy)
    chosen = []
    for table in tables:
        with mistakes.noted():
            chosen.append(options[table.name].of(table, f"tables.{table.name}") if table.name in options else table)
    mistakes.raise_all()
    return tuple(chosen)
