"""Items that a running server is told of: known at once by their features, without an id that training has met.

A new item has the vector that an export would give to an item without training events: that of its features alone, in
retrieval, and in ranking with the row of the unknown item. Where tables have room, rows are written between two batches
and nothing is loaded anew; else the model is served again out of larger tables, which have room from then on.

Legend: n new items, D model width.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from nestrec.base.errors import UserError, did_you_mean
from nestrec.data.dataset_schema import ITEM_PREFIX
from nestrec.models.encoder_parts import FeatureProjections, summed
from nestrec.serving.model.request_inputs import (
    LARGEST_NUMBER,
    buckets_of,
    key_of,
    number_bits,
    number_of,
    numbers_of,
    row_of,
)
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import ColumnSpec
from nestrec.serving.model.served_tables import DeviceTable, ServedTable
from nestrec.serving.service.inference_service import Service

Ints = NDArray[np.int64]
_SPARE_SHARE, _FEWEST_SPARE = 8, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class NewItem:
    """What is told of one."""

    key: str
    """as requests will name it"""
    features: Mapping[str, Any] = field(default_factory=dict)
    """raw values by name; what is left out nobody knows"""
    title: str = ""
    """for people"""


def add_items(service: Service, items: Sequence[NewItem]) -> int:
    """Serve these from now on; how many a model did not know yet. All models take them, or none does."""
    with service.adding:
        grown = {}
        for role, fleet in service.fleets.items():
            if role in service.followed:
                remedy = "train on them: the run that it follows brings them"
                raise UserError("follows a run", option="model", value=role, remedy=remedy)
            ids = fleet.servable.ids_of([item.key for item in items])
            fresh = [item for item, place in zip(items, ids.tolist(), strict=True) if not place]
            grown[role] = NewItemInsertion(fleet.servable, list({item.key: item for item in fresh}.values()))
        wanting = {role: growth for role, growth in grown.items() if growth.count}
        if all(growth.has_room for growth in wanting.values()):
            for role, growth in wanting.items():
                service.advance(role, growth.after, growth.apply)
        else:
            larger = [NewItemInsertion(growth.roomy(), growth.items) for growth in wanting.values()]
            for growth in larger:
                growth.apply()
            service.swap(*(growth.after for growth in larger))
        return max((growth.count for growth in grown.values()), default=0)


class NewItemInsertion:
    """New items of one model."""

    def __init__(self, servable: Servable, items: Sequence[NewItem]):
        _check(servable, items)
        self._servable = servable
        self.items = items
        self.count = len(items)
        self._first = servable.spec.num_items + 1
        self._of_items = [c for c in servable.spec.columns if c.name.startswith(ITEM_PREFIX)]
        self.after = self._described()

    @property
    def has_room(self) -> bool:
        """Whether nothing has to be made anew."""
        end = self._first + self.count
        enough = self._servable.tables["items"].room >= end
        index = self._servable.index
        enough = enough and (index is None or index.room >= end - 1)
        return enough and all(len(column) >= end for column in self._servable.item_columns.values())

    def roomy(self) -> Servable:
        """The same model in tables with room for these items and more."""
        servable = self._servable
        room = (self._first + self.count) + max(_FEWEST_SPARE, (self._first + self.count) // _SPARE_SHARE)
        items = servable.tables["items"]
        larger = _larger(items, room)
        return replace(
            servable,
            tables={name: larger if table is items else table for name, table in servable.tables.items()},
            index=None if servable.index is None else _larger(servable.index, room),
            item_columns={name: _padded(column, room) for name, column in servable.item_columns.items()},
        )

    @torch.inference_mode()
    def apply(self) -> None:
        """Write them into the tables, while nobody reads these."""
        servable = self._servable
        end = self._first + self.count
        ids = torch.arange(self._first, end)
        rows_nD = self._rows()
        items = servable.tables["items"]
        items.put(ids.to(items.row_device), rows_nD.to(items.rows(torch.zeros(1, dtype=torch.int64))))
        items.num_rows = end
        if (index := servable.index) is not None:
            assert servable.serving.index is not None
            vectors_nD = servable.serving.index(servable.model, rows_nD)
            index.put((ids - 1).to(index.row_device), vectors_nD.to(index.row_device))
            index.num_rows = end - 1
        for column in self._of_items:
            if column.name in servable.item_columns:
                places = servable.item_columns[column.name]
                places[ids.to(places.device)] = torch.from_numpy(self._ids(column)).to(places.device)
        servable.item_ids.grow([item.key for item in self.items], self._first - 1)

    def _described(self) -> Servable:
        old = self._servable
        keys = tuple(item.key for item in self.items)
        titles = (*old.item_titles, *(item.title for item in self.items)) if old.item_titles else ()
        told = repr([(item.key, sorted(item.features.items()), item.title) for item in self.items])
        after = replace(
            old,
            spec=replace(old.spec, num_items=old.spec.num_items + self.count),
            version=hashlib.sha256(f"{old.version} {told}".encode()).hexdigest() if self.count else old.version,
            item_keys=(*old.item_keys, *keys),
            item_titles=titles,
            probe=None,
        )
        after.__dict__["item_ids"] = old.item_ids  # it grows when they are applied
        return after

    def _rows(self) -> torch.Tensor:
        """(n, D or more) what the table of items holds of them."""
        servable = self._servable
        unknown_1D = servable.tables["items"].rows(torch.zeros(1, dtype=torch.int64)).to(servable.dtype)
        if not servable.spec.folds_items:
            return unknown_1D.expand(self.count, -1)
        parts = self._parts([item.features for item in self.items])
        if servable.spec.item_vectors > 1:
            unknown = unknown_1D[:, : parts[0].shape[1]].expand(self.count, -1)
            return torch.cat([unknown, *parts], dim=1)
        if servable.index is not None:
            return summed(parts)
        return summed(parts) + unknown_1D - summed(self._parts([{}]))

    def _parts(self, told: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
        """(n, D) of each feature."""
        found = []
        for column in self._of_items:
            name = column.name.removeprefix(ITEM_PREFIX)
            found.append(self._vectors(column, [features.get(name) for features in told]))
        return found

    def _vectors(self, column: ColumnSpec, values: Sequence[Any]) -> torch.Tensor:
        servable = self._servable
        to_width = cast(FeatureProjections, self._servable.model.to_width)
        if column.kind == "number":
            numbers_n2 = numbers_of(torch.from_numpy(number_bits(column.transform.numbers(_numbers(values)))))
            found: torch.Tensor = to_width(column.name, numbers_n2.to(servable.device, servable.dtype))
            return found
        if column.kind == "vector":
            wide = np.array([np.zeros(column.width) if value is None else value for value in values], np.float32)
            projected: torch.Tensor = to_width(column.name, torch.from_numpy(wide).to(servable.device, servable.dtype))
            return projected
        table = servable.tables[column.name]
        if column.kind == "category":
            return table.rows(torch.from_numpy(self._category_ids(column, values))).to(servable.dtype)
        ids, counts = self._list_ids(column, values)
        rows_PD = table.rows(torch.from_numpy(ids)).to(servable.dtype)
        lengths = torch.from_numpy(counts).to(rows_PD.device)
        pooled_nD = torch.segment_reduce(rows_PD, "sum", lengths=lengths, unsafe=True, initial=0.0)
        return pooled_nD / lengths.clamp(min=1)[:, None] if column.pooling == "mean" else pooled_nD

    def _ids(self, column: ColumnSpec) -> Ints:
        name = column.name.removeprefix(ITEM_PREFIX)
        return self._category_ids(column, [item.features.get(name) for item in self.items])

    def _category_ids(self, column: ColumnSpec, values: Sequence[Any]) -> Ints:
        """0 of one that nobody knows."""
        known = self._servable.column_ids.get(column.name)
        if column.transform.kind == "quantiles":
            return buckets_of(values, column.transform, known or {})
        if known is None:
            return np.array([row_of(value, column.num_rows) for value in values], np.int64)
        return np.array([0 if value is None else known.get(key_of(value), 0) for value in values], np.int64)

    def _list_ids(self, column: ColumnSpec, values: Sequence[Any]) -> tuple[Ints, Ints]:
        """Ids of all, and how many each has; values of a list that nobody knows are left out."""
        if column.kind == "bag":
            return column.transform.bags(pa.array([value or "" for value in values], pa.string()))
        ids = [self._category_ids(column, value or []) for value in values]
        known = [found[found > 0] for found in ids]
        return np.concatenate([*known, np.zeros(0, np.int64)]), np.array([len(found) for found in known], np.int64)


def _check(servable: Servable, items: Sequence[NewItem]) -> None:
    """Raise a UserError where the model cannot take them."""
    of_items = {c.name.removeprefix(ITEM_PREFIX): c for c in servable.spec.columns if c.name.startswith(ITEM_PREFIX)}
    if items and servable.index is not None and not of_items:
        remedy = "train it with --task.inputs.item_features, or export a run that has met the items"
        raise UserError("knows items by their ids alone", option="model", value=servable.spec.name, remedy=remedy)
    if items and servable.spec.search.kind != "exact":
        remedy = "serve it with an exact search, or export the items"
        raise UserError("is made once, at export", option="search.kind", value=servable.spec.search.kind, remedy=remedy)
    for item in items:
        for name, value in item.features.items():
            column = of_items.get(name)
            field_name = f"items.{item.key}.features.{name}"
            if column is None and of_items:
                remedy = did_you_mean(name, of_items)
                raise UserError("is no feature of items of the model", option=field_name, value=value, remedy=remedy)
            if column is not None and value is not None and (problem := _problem(servable, column, value)):
                raise UserError(problem, option=field_name, value=value, remedy="give what the log has")


def _problem(servable: Servable, column: ColumnSpec, value: Any) -> str | None:
    match column.kind:
        case "number":
            return _problem_of([value], column) if _is_number(value) else "must be a number"
        case "vector":
            is_fit = isinstance(value, list) and len(value) == column.width and all(map(_is_number, value))
            return _problem_of(value, column) if is_fit else f"must be a list of {column.width} numbers"
        case "categories":
            return None if isinstance(value, list) else "must be a list"
        case "bag":
            return None if isinstance(value, str) else "must be a text"
    if isinstance(value, list | dict):
        return "must be one value"
    is_named = column.transform.kind != "quantiles" or value in servable.column_ids.get(column.name, ())
    return None if is_named or not np.isnan(number_of(value)) else "must be a number"


def _problem_of(numbers: Sequence[float], column: ColumnSpec) -> str | None:
    """A row that is not finite would stay in the tables."""
    read = column.transform.numbers(np.array([number_of(number) for number in numbers]))
    is_fit = (np.abs(read) <= LARGEST_NUMBER).all()
    return None if is_fit else f"must be within {LARGEST_NUMBER:g}, to be computed with"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(values: Sequence[Any]) -> NDArray[np.float64]:
    return np.array([np.nan if value is None else float(value) for value in values])


def _larger(table: ServedTable, room: int) -> DeviceTable:
    if not isinstance(table, DeviceTable):
        remedy = "serve with --tables.store device, or export the items"
        raise UserError("take no new items", option="tables", value="outside the device", remedy=remedy)
    return DeviceTable(_padded(table.weight[: table.num_rows], room), table.num_rows)


def _padded(column: torch.Tensor, room: int) -> torch.Tensor:
    return torch.cat([column, column.new_zeros(max(0, room - len(column)), *column.shape[1:])])
