"""Whether a model that was read can serve: shapes that belong together, and finite numbers throughout."""

from collections.abc import Iterable

import torch

from nestrec.base.errors import DamagedError
from nestrec.serving.model.rows.keyed_table import KeyedTable
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.spec import (
    COLUMNS_FILE,
    INDEX_FILE,
    ITEMS_FILE,
    KEYS_FILE,
    SPEC_FILE,
    WEIGHTS_FILE,
    table_file,
)
from nestrec.serving.model.tables import ServedTable


def check_sound(servable: Servable) -> None:
    """`DamagedError` that names the file. Digests do not tell: what was written wrong has the right ones."""
    spec = servable.spec
    _check(len(servable.item_keys) == spec.num_items, ITEMS_FILE, f"must name {spec.num_items} items, as the spec says")
    _check(len(set(servable.item_keys)) == spec.num_items, ITEMS_FILE, "names an item twice")
    if servable.reads_items:
        _check_rows(servable.tables["items"], spec.num_items + 1, table_file("items"))
    if servable.index is not None:
        _check_rows(servable.index, spec.num_items, INDEX_FILE)
    for column in spec.columns:
        if not column.has_table:
            continue
        _check_rows(servable.tables[column.name], column.num_rows, table_file(column.name))
        if column.by_key is not None:
            continue
        num_keys = 0 if column.keys is None else len(column.keys)
        _check(num_keys < column.num_rows, SPEC_FILE, f"has more keys of {column.name} than its table has rows")
    for name, categories in servable.item_columns.items():
        _check(len(categories) >= spec.num_items + 1, COLUMNS_FILE, f"must have {spec.num_items + 1} values of {name}")
        num_rows = servable.columns[name].num_rows
        is_there = not len(categories) or bool(((categories >= 0) & (categories < num_rows)).all())
        _check(is_there, COLUMNS_FILE, f"has categories of {name} that its table does not have")
    _check(_are_finite(servable.model.state_dict().values()), WEIGHTS_FILE, "has numbers that are not finite")
    dim = servable.encoder_config.dim
    for name, table in servable.tables.items():
        if name == "items":
            _check_table(table, dim * spec.item_vectors, table_file(name))
        else:
            _check_table(table, dim, table_file(servable.columns[name].table_name))
    if servable.index is not None:
        _check_table(servable.index, dim, INDEX_FILE)


def _check_rows(table: ServedTable, num_rows: int, file: str) -> None:
    _check(table.num_rows == num_rows, file, f"has {table.num_rows} rows where the spec has {num_rows}")


def _check_table(table: ServedTable, dim: int, file: str) -> None:
    if isinstance(table, KeyedTable):
        dim = table.begins.dim
        is_ascending = len(table.keys) == table.num_rows and bool((table.keys[1:] > table.keys[:-1]).all())
        _check(is_ascending, KEYS_FILE, "must have a key for each row, ascending")
    for _, part in table.parts():
        _check(part.shape[1] == dim, file, f"has rows of {part.shape[1]} numbers where the model has {dim}")
        _check(_are_finite([part]), file, "has numbers that are not finite")


def _are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors if tensor.is_floating_point())


def _check(is_so: bool, file: str, problem: str) -> None:
    if not is_so:
        raise DamagedError(problem, field="servable file", value=file, remedy="export the run again")
