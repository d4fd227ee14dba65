"""Cold-start items: adds items to the catalog of a running server by their features, without training.

A cold-start item gets the vector that an export would compute for an item without training events: in retrieval the
vector of its features alone, in ranking the features plus the embedding of the unknown item. If the tables have spare
capacity, the rows are written between two batches. Otherwise the model is swapped for a copy with larger tables, which
then have spare capacity.

Legend: n new items, D model width, P list elements of all items.
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
from nestrec.models.encoder_parts import FeatureProjections, sum_features
from nestrec.serving.model.request_inputs import (
    LARGEST_NUMBER,
    bucket_values,
    category_key,
    category_row,
    number_bits,
    number_features,
    parse_number,
)
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import ColumnSpec
from nestrec.serving.model.served_tables import DeviceTable, ServedTable
from nestrec.serving.service.inference_service import Service

Ints = NDArray[np.int64]
_SPARE_DIVISOR, _MIN_SPARE_ROWS = 8, 1024
"""Spare capacity of enlarged tables: an eighth of the rows, but at least 1024 rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewItem:
    """Cold-start item to add."""

    key: str
    """Source id of the item in requests."""
    features: Mapping[str, Any] = field(default_factory=dict)
    """Raw values of item features by name; omitted features are unknown."""
    title: str = ""
    """Title of the item, for display."""


def add_items(service: Service, items: Sequence[NewItem]) -> int:
    """Add items to the catalogs of all models in service; either all models get them, or none.

    Args:
        service: The running service.
        items: Items to add; items that are already in a catalog are unchanged.

    Returns:
        Number of items that were new to at least one model.

    Raises:
        UserError: A model cannot represent the items, or follows a run, which adds items itself.
    """
    with service.add_items_lock:
        insertions = {}
        for role, deployment in service.deployments.items():
            if role in service.live_versions:
                remedy = "train on the new items: the model follows a run, which publishes them"
                raise UserError(
                    "cannot add items to a model that follows a run", option="model", value=role, remedy=remedy
                )
            rows = deployment.servable.ids_of([item.key for item in items])
            new_items = [item for item, row in zip(items, rows.tolist(), strict=True) if not row]
            insertions[role] = NewItemInsertion(
                deployment.servable, list({item.key: item for item in new_items}.values())
            )
        pending = {role: insertion for role, insertion in insertions.items() if insertion.count}
        if all(insertion.has_capacity for insertion in pending.values()):
            for role, insertion in pending.items():
                service.apply_version(role, insertion.after, insertion.apply)
        else:
            larger = [NewItemInsertion(insertion.with_capacity(), insertion.items) for insertion in pending.values()]
            for insertion in larger:
                insertion.apply()
            service.swap(*(insertion.after for insertion in larger))
        return max((insertion.count for insertion in insertions.values()), default=0)


class NewItemInsertion:
    """Insertion of cold-start items into one model."""

    def __init__(self, servable: Servable, items: Sequence[NewItem]):
        _check(servable, items)
        self._servable = servable
        self.items = items
        self.count = len(items)
        self._first = servable.spec.num_items + 1
        self._of_items = [c for c in servable.spec.columns if c.name.startswith(ITEM_PREFIX)]
        self.after = self._servable_after()

    @property
    def has_capacity(self) -> bool:
        """Whether all tables have capacity for the items."""
        end = self._first + self.count
        is_sufficient = self._servable.tables["items"].capacity >= end
        index = self._servable.index
        is_sufficient = is_sufficient and (index is None or index.capacity >= end - 1)
        return is_sufficient and all(len(column) >= end for column in self._servable.item_columns.values())

    def with_capacity(self) -> Servable:
        """Return a copy of the model whose tables have capacity for these items and further ones."""
        servable = self._servable
        capacity = (self._first + self.count) + max(_MIN_SPARE_ROWS, (self._first + self.count) // _SPARE_DIVISOR)
        items = servable.tables["items"]
        larger = _enlarge(items, capacity)
        return replace(
            servable,
            tables={name: larger if table is items else table for name, table in servable.tables.items()},
            index=None if servable.index is None else _enlarge(servable.index, capacity),
            item_columns={name: _pad(column, capacity) for name, column in servable.item_columns.items()},
        )

    @torch.inference_mode()
    def apply(self) -> None:
        """Write the items into the tables; no engine may read the tables meanwhile."""
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
                categories = servable.item_columns[column.name]
                categories[ids.to(categories.device)] = torch.from_numpy(self._ids(column)).to(categories.device)
        servable.item_ids.grow([item.key for item in self.items], self._first - 1)

    def _servable_after(self) -> Servable:
        old = self._servable
        keys = tuple(item.key for item in self.items)
        titles = (*old.item_titles, *(item.title for item in self.items)) if old.item_titles else ()
        content = repr([(item.key, sorted(item.features.items()), item.title) for item in self.items])
        after = replace(
            old,
            spec=replace(old.spec, num_items=old.spec.num_items + self.count),
            version=hashlib.sha256(f"{old.version} {content}".encode()).hexdigest() if self.count else old.version,
            item_keys=(*old.item_keys, *keys),
            item_titles=titles,
            golden_request=None,
        )
        after.__dict__["item_ids"] = old.item_ids  # shared: `apply` adds the items
        return after

    def _rows(self) -> torch.Tensor:
        """Return the rows (n, D or wider) of the items in the item table."""
        servable = self._servable
        unknown_1D = servable.tables["items"].rows(torch.zeros(1, dtype=torch.int64)).to(servable.dtype)
        if not servable.spec.folds_items:
            return unknown_1D.expand(self.count, -1)
        vectors = self._feature_vectors([item.features for item in self.items])
        if servable.spec.item_vectors > 1:
            unknown = unknown_1D[:, : vectors[0].shape[1]].expand(self.count, -1)
            return torch.cat([unknown, *vectors], dim=1)
        if servable.index is not None:
            return sum_features(vectors)
        return sum_features(vectors) + unknown_1D - sum_features(self._feature_vectors([{}]))

    def _feature_vectors(self, items: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
        """Return the vectors (n, D) of each item feature."""
        vectors = []
        for column in self._of_items:
            name = column.name.removeprefix(ITEM_PREFIX)
            vectors.append(self._vectors(column, [features.get(name) for features in items]))
        return vectors

    def _vectors(self, column: ColumnSpec, values: Sequence[Any]) -> torch.Tensor:
        servable = self._servable
        to_width = cast(FeatureProjections, self._servable.model.to_width)
        if column.kind == "number":
            numbers_n2 = number_features(torch.from_numpy(number_bits(column.transform.numbers(_numbers(values)))))
            scaled: torch.Tensor = to_width(column.name, numbers_n2.to(servable.device, servable.dtype))
            return scaled
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
        """Return the category ids of values; 0 for unknown values."""
        known = self._servable.column_ids.get(column.name)
        if column.transform.kind == "quantiles":
            return bucket_values(values, column.transform, known or {})
        if known is None:
            return np.array([category_row(value, column.num_rows) for value in values], np.int64)
        return np.array([0 if value is None else known.get(category_key(value), 0) for value in values], np.int64)

    def _list_ids(self, column: ColumnSpec, values: Sequence[Any]) -> tuple[Ints, Ints]:
        """Return the concatenated category ids of lists and the length of each list, without unknown values."""
        if column.kind == "bag":
            return column.transform.bags(pa.array([value or "" for value in values], pa.string()))
        ids = [self._category_ids(column, value or []) for value in values]
        known = [list_ids[list_ids > 0] for list_ids in ids]
        return np.concatenate([*known, np.zeros(0, np.int64)]), np.array([len(one) for one in known], np.int64)


def _check(servable: Servable, items: Sequence[NewItem]) -> None:
    """Raise a UserError if the items cannot be added to the model."""
    of_items = {c.name.removeprefix(ITEM_PREFIX): c for c in servable.spec.columns if c.name.startswith(ITEM_PREFIX)}
    if items and servable.index is not None and not of_items:
        remedy = "train it with --task.inputs.item_features, or export a run whose dataset contains the items"
        raise UserError(
            "a model without item features cannot represent new items",
            option="model",
            value=servable.spec.name,
            remedy=remedy,
        )
    if items and servable.spec.search.kind != "exact":
        remedy = "export the model with exact search, or with the new items"
        raise UserError(
            "this search index cannot be changed after the export",
            option="search.kind",
            value=servable.spec.search.kind,
            remedy=remedy,
        )
    for item in items:
        for name, value in item.features.items():
            column = of_items.get(name)
            field_name = f"items.{item.key}.features.{name}"
            if column is None and of_items:
                remedy = did_you_mean(name, of_items)
                raise UserError(
                    "the model has no item feature of this name", option=field_name, value=value, remedy=remedy
                )
            if column is not None and value is not None and (problem := _problem(servable, column, value)):
                raise UserError(problem, option=field_name, value=value, remedy="use values as in the event log")


def _problem(servable: Servable, column: ColumnSpec, value: Any) -> str | None:
    match column.kind:
        case "number":
            return _range_problem([value], column) if _is_number(value) else "must be a number"
        case "vector":
            is_valid = isinstance(value, list) and len(value) == column.width and all(map(_is_number, value))
            return _range_problem(value, column) if is_valid else f"must be a list of {column.width} numbers"
        case "categories":
            return None if isinstance(value, list) else "must be a list"
        case "bag":
            return None if isinstance(value, str) else "must be text"
    if isinstance(value, list | dict):
        return "must be one value"
    is_category = column.transform.kind != "quantiles" or value in servable.column_ids.get(column.name, ())
    return None if is_category or not np.isnan(parse_number(value)) else "must be a number"


def _range_problem(numbers: Sequence[float], column: ColumnSpec) -> str | None:
    """Return an error if a number is too large: a row that is not finite would stay in the tables."""
    transformed = column.transform.numbers(np.array([parse_number(number) for number in numbers]))
    is_valid = (np.abs(transformed) <= LARGEST_NUMBER).all()
    return None if is_valid else f"must be between -{LARGEST_NUMBER:g} and {LARGEST_NUMBER:g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(values: Sequence[Any]) -> NDArray[np.float64]:
    return np.array([np.nan if value is None else float(value) for value in values])


def _enlarge(table: ServedTable, capacity: int) -> DeviceTable:
    if not isinstance(table, DeviceTable):
        remedy = "serve with --tables.store=device, or export the model with the new items"
        raise UserError(
            "only tables in device memory can be enlarged", option="tables", value="outside the device", remedy=remedy
        )
    return DeviceTable(_pad(table.weight[: table.num_rows], capacity), table.num_rows)


def _pad(column: torch.Tensor, capacity: int) -> torch.Tensor:
    return torch.cat([column, column.new_zeros(max(0, capacity - len(column)), *column.shape[1:])])
