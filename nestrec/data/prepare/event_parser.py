"""Parses raw rows into event records, and selects the events that feature transforms are fitted on.

`EventParser` validates the rows of a batch, filters them by rating, and replaces the ids of users, items and category
values by dense codes. Invalid rows go to the quarantine.

`find_training_subset` fits transforms only on events that are training data under both a temporal split and a
leave-last-out split, so that no statistics of validation or test events leak into the features.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nestrec.base.errors import DataError, ErrorCollector, UserError, did_you_mean
from nestrec.data.dataset_card import Feature, FeatureKind, TransformFit
from nestrec.data.dataset_schema import COUNTS_SUFFIX, EVENT_PREFIX, LATEST_TIME_MS
from nestrec.data.flat_arrays import offsets_of_lengths
from nestrec.data.prepare.id_encoder import FilterResult, IdEncoder, as_texts
from nestrec.data.prepare.json_lines import parse_line
from nestrec.data.prepare.list_cells import (
    LIST_MARK,
    as_display_text,
    encode_lists,
    event_signatures,
    has_marks,
    signatures_of_objects,
)
from nestrec.data.prepare.parse import (
    AHEAD,
    BAD,
    BLANK,
    GOOD,
    NOT_A_NUMBER,
    NOT_A_TIME,
    OUT_OF_RANGE,
    UNIT_NAMES,
    first_number,
    parse_integers,
    parse_numbers,
    parse_times_ms,
    plausible_units,
)
from nestrec.data.prepare.prepare_options import LogColumns, PrepareOptions, TimeUnit
from nestrec.data.prepare.raw_rows import RAW_LINE, SIGNATURE, BadRow, RawBatch
from nestrec.data.prepare.spill_files import KeyPartitions, Records
from nestrec.data.prepare.transform_fitting import TransformFitter, ValueSample, bucket_labels
from nestrec.data.transform import Transform

POSITIVE = "positive"
RATING = "rating"
MAX_ACTIONS = 31
"""Datasets store the actions of an event as bits of a signed 32-bit integer."""
_NON_TIME_TYPES = (pa.types.is_boolean, pa.types.is_time, pa.types.is_duration)
_MAX_EXAMPLE_VALUES = 20


def option_of_column(log: LogColumns, name: str) -> str:
    """Return the option that names a column of the log, for error messages."""
    for each in dataclasses.fields(log):
        value = getattr(log, each.name)
        named = tuple(value.values()) if isinstance(value, Mapping) else value
        named = (named,) if isinstance(named, str) else named
        if isinstance(named, tuple) and any(str(one).partition(":")[0] == name for one in named):
            return f"log.{each.name}"
    return "column"


@dataclass(frozen=True, slots=True)
class EventColumns:
    """Schema of an event log: the columns that are read, and their meaning."""

    log: LogColumns
    action_bits: dict[str, int] = field(default_factory=dict)
    """Bit of each action of `log.actions`, and of `positive` if it is derived from ratings."""
    min_rating: float | None = None
    """Minimum rating of an event; events with a lower rating are removed. None keeps all events."""
    positive_rating: float | None = None
    """Minimum rating at which an event gets the action `positive`; None does not derive this action."""

    def __post_init__(self) -> None:
        log = self.log
        rating = [RATING] if log.rating else []
        names = [*rating, *log.outcome_features, *log.numbers, *log.categories, *log.lists, *log.texts]
        for name, count in Counter(names).items():
            if count > 1:
                remedy = "name it in only one of log.categories, lists, numbers, texts and outcome_features"
                raise UserError("the feature is named more than once", option="log", value=name, remedy=remedy)
        for column in (log.rating, *log.outcome_features.values()):
            if column in (*log.numbers, *log.categories, *log.lists, *log.texts):
                raise UserError(
                    "the column is both an outcome that is known only after the event (log.outcome_features, "
                    "log.rating) and an input that is known before it",
                    option="log",
                    value=column,
                    remedy="name the column only once, otherwise models read the outcome that they predict",
                )
        if len(self.action_bits) > MAX_ACTIONS:
            raise UserError(
                f"these are {len(self.action_bits)} actions, including `positive`; a dataset has at most {MAX_ACTIONS}",
                option="log.actions",
                value=", ".join(self.action_bits),
                remedy="remove some actions, or name their column in --log.categories",
            )
        if log.user == log.item:
            raise UserError(
                "is also the column of users",
                option="log.item",
                value=log.item,
                remedy="set --log.item to the column of item ids",
            )
        for name in self.list_features():
            if (clash := name + COUNTS_SUFFIX) in names:
                problem = f"the dataset uses this name for the number of values of {name!r} per event"
                raise UserError(problem, option="log", value=clash, remedy="rename the column")
        for name in log.transforms:
            if name not in log.numbers:
                remedy = did_you_mean(name, log.numbers) if log.numbers else "name it in --log.numbers"
                raise UserError("not a column of --log.numbers", option="log.transforms", value=name, remedy=remedy)

    @staticmethod
    def of(log: LogColumns, *, min_rating: float | None = None, positive_rating: float | None = None) -> "EventColumns":
        """Return the schema with one bit per action, in the order of the actions; `positive` has the last bit."""
        names = [*log.actions, *([POSITIVE] if log.rating and positive_rating is not None else [])]
        return EventColumns(log, {name: 1 << i for i, name in enumerate(names)}, min_rating, positive_rating)

    def columns_to_read(self, known: Collection[str] = ()) -> list[str]:
        """Return the columns that are read.

        Args:
            known: Columns of the file, to find the end of the column name in `column:value` of an action.
        """
        log = self.log
        actions = [_action_column(text, known)[0] for text in log.actions.values()]
        features = [*log.outcome_features.values(), *log.numbers, *log.categories, *log.lists, *log.texts]
        names = [log.user, log.item, log.time, log.position, log.rating, *actions, *features]
        return [name for name in names if name is not None]

    def required_columns(self) -> list[str]:
        """Return the columns without which no row can be read: all except those of actions."""
        return replace(self, log=replace(self.log, actions={})).columns_to_read()

    def sort_fields(self) -> list[str]:
        return [name for name in ("time", "position") if getattr(self.log, name)]

    def number_features(self) -> dict[str, str]:
        """Return the column of each numeric feature."""
        rating = {RATING: self.log.rating} if self.log.rating else {}
        return {**rating, **self.log.outcome_features, **{name: name for name in self.log.numbers}}

    def list_features(self) -> tuple[str, ...]:
        """Return the features with several ids per event."""
        return (*self.log.lists, *self.log.texts)

    def dtype(self) -> np.dtype[Any]:
        """Return the dtype of an event record."""
        fields: list[tuple[str, str]] = [("user", "i4"), ("item", "i4"), ("signature", "u8")]
        fields += [(name, "i8") for name in self.sort_fields()]
        fields += [("actions", "i4")] if self.action_bits else []
        fields += [(f"event_{name}", "f4") for name in self.number_features()]
        fields += [(f"event_{name}", "i4") for name in self.log.categories]
        fields += [(f"event_{name}{COUNTS_SUFFIX}", "i4") for name in self.list_features()]
        return np.dtype(fields)

    def list_dtypes(self) -> dict[str, np.dtype[Any]]:
        """Return the dtype of the values of each list of an event record."""
        return {f"event_{name}": np.dtype(np.int32) for name in self.list_features()}


class _Verdict:
    """Validation result of a batch: the first reason why each bad row is rejected."""

    def __init__(self, num_rows: int):
        self._reasons = [""]
        self._reason_of_row = np.zeros(num_rows, dtype=np.int16)

    def reject(self, rows: NDArray[np.bool_], reason: str) -> None:
        if rows.any():
            self._reason_of_row[rows & (self._reason_of_row == 0)] = len(self._reasons)
            self._reasons.append(reason)

    def good(self) -> NDArray[np.bool_]:
        return np.equal(self._reason_of_row, 0)

    def bad_rows(self, batch: RawBatch) -> list[BadRow]:
        bad = np.flatnonzero(self._reason_of_row)
        return [BadRow(int(batch.lines[i]), self._reasons[self._reason_of_row[i]], batch.row_text(int(i))) for i in bad]


class EventParser:
    """Parser of raw batches, with the vocabularies of users, items and category values.

    Ids get dense codes in order of first appearance, so batches must be parsed in input order.
    """

    def __init__(self, columns: EventColumns):
        self.columns = columns
        self.dtype = columns.dtype()
        self.field_names = self.dtype.names or ()
        self.users, self.items = IdEncoder(), IdEncoder()
        self.vocabularies = {name: IdEncoder() for name in (*columns.log.categories, *columns.log.lists)}
        self.transforms: dict[str, Transform] = {}
        """Fitted transform of each numeric feature; empty until `find_training_subset` has run."""
        self._text_transform = columns.log.hashing.transform()
        max_future_s = columns.log.max_future_s
        self._latest_ms = LATEST_TIME_MS if max_future_s is None else round(1000 * (time.time() + max_future_s))
        self.time_hint = ""
        """Suggested unit of the times that could not be parsed, for the error message."""
        self._unit: TimeUnit | None = None if columns.log.time_unit == "auto" else columns.log.time_unit
        self._example_of_unit = ""
        self.num_below_rating = 0
        self._observed_actions: set[str] = set()
        self._example_values: dict[str, dict[str, None]] = {}

    def parse(self, batch: RawBatch) -> tuple[Records, list[BadRow]]:
        """Return the records of the valid rows in input order, and the rejected rows.

        Raises:
            DataError: A column is missing or has an unsupported type, or times have different units.
        """
        self._check_columns(batch)
        records = np.zeros(batch.num_rows, dtype=self.dtype)
        verdict = _Verdict(batch.num_rows)
        log = self.columns.log
        for name, what in ((log.user, "user"), (log.item, "item")):
            verdict.reject(is_missing(batch.columns[name]), f"missing {what}")
            if RAW_LINE in batch.columns and has_marks(batch.columns[name]):
                verdict.reject(
                    pc.match_substring(batch.columns[name], LIST_MARK).to_numpy(zero_copy_only=False),
                    f"{what} is a list",
                )
        self._parse_order(batch, records, verdict)
        self._parse_numbers(batch, records, verdict)
        if self.columns.action_bits:
            records["actions"] = self._parse_actions(batch, records, verdict)
        keep = verdict.good() & self._meets_min_rating(records, verdict.good())
        return self._encode(batch, records, keep), verdict.bad_rows(batch)

    def transform_fitters(self) -> dict[str, TransformFitter]:
        """Return a fitter for the transform of each numeric feature that models may read as an input."""
        log = self.columns.log
        return {name: TransformFitter(log.transforms.get(name, "quantiles"), log.num_buckets) for name in log.numbers}

    def features(self) -> tuple[Feature, ...]:
        """Return the descriptions of the event features for the dataset card."""
        log = self.columns.log
        features = [
            Feature(name=n, kind="number", known="after")
            for n in self.columns.number_features()
            if n not in log.numbers
        ]
        for name in log.numbers:
            transform = self.transforms[name]
            is_bucketed = transform.kind == "quantiles"
            size = len(transform.bounds) + 1 if is_bucketed else 0
            features.append(
                Feature(
                    name=name, kind="category" if is_bucketed else "number", vocabulary_size=size, transform=transform
                )
            )
        for name, table in self.vocabularies.items():
            kind: FeatureKind = "category" if name in log.categories else "categories"
            features.append(Feature(name=name, kind=kind, vocabulary_size=len(table) + 1))
        size = self._text_transform.buckets
        bags = [Feature(name=n, kind="bag", vocabulary_size=size, transform=self._text_transform) for n in log.texts]
        return (*features, *bags)

    def category_keys(self) -> dict[str, pa.Array]:
        """Return the values of each category feature in order of id; the first has id 1."""
        cut = {name: t for name, t in self.transforms.items() if t.kind == "quantiles"}
        return {
            **{name: table.all_keys() for name, table in self.vocabularies.items()},
            **{name: pa.array(bucket_labels(transform), pa.string()) for name, transform in cut.items()},
        }

    def is_bucketed(self, name: str) -> bool:
        """Return whether the number in this field of a record is replaced by the id of its quantile bucket."""
        transform = self.transforms.get(name.removeprefix(EVENT_PREFIX))
        return transform is not None and transform.kind == "quantiles"

    def bucket_ids(self, name: str, values: NDArray[Any]) -> NDArray[np.int64] | None:
        """Return the bucket ids of the values of a bucketed field; None for other fields."""
        return self.transforms[name.removeprefix(EVENT_PREFIX)].bucket_ids(values) if self.is_bucketed(name) else None

    def _check_columns(self, batch: RawBatch) -> None:
        log = self.columns.log
        errors = ErrorCollector()
        for name in self.columns.columns_to_read(batch.columns):
            with errors.collecting():
                if name not in batch.columns:
                    hint = " (is the separator right? --log.separator ';')" if len(batch.names) == 1 else ""
                    raise DataError(
                        f"no such column in {batch.file}",
                        option=option_of_column(log, name),
                        value=name,
                        remedy=did_you_mean(name, batch.names) + hint,
                    )
                if name not in log.lists:
                    _check_type(batch, name, is_time=name in (log.time, log.position))
        errors.raise_if_any()

    def _parse_order(self, batch: RawBatch, records: NDArray[Any], verdict: _Verdict) -> None:
        log = self.columns.log
        if log.time:
            times_ms, states, out_of_range = parse_times_ms(batch.columns[log.time], self._infer_unit(batch))
            verdict.reject(states == BLANK, "missing time")
            verdict.reject(states == BAD, NOT_A_TIME)
            verdict.reject(out_of_range, OUT_OF_RANGE)
            verdict.reject(times_ms > self._latest_ms, AHEAD)
            self._record_time_hint(
                batch.columns[log.time], (states == BAD) | out_of_range | (times_ms > self._latest_ms)
            )
            records["time"] = times_ms
        if log.position:
            positions, states = parse_integers(batch.columns[log.position])
            verdict.reject(states != GOOD, "position is not a whole number")
            records["position"] = positions

    def _infer_unit(self, batch: RawBatch) -> TimeUnit:
        """Return the unit of the times: the configured one, or the one that makes the first times plausible.

        An inferred unit applies to all later batches.

        Raises:
            DataError: The times of this batch have another unit.
        """
        log = self.columns.log
        if log.time_unit != "auto":
            return log.time_unit
        assert log.time is not None
        times = batch.columns[log.time]
        plausible = plausible_units(times)
        if not plausible and self._unit is None and (number := first_number(times)) is not None:
            plausible = {"s": number}
        if self._unit is not None:
            plausible = {self._unit: self._example_of_unit, **plausible}
        if len(plausible) > 1:
            (unit, example), (other, other_example) = list(plausible.items())[:2]
            raise DataError(
                f"the times have different units: {example} looks like {UNIT_NAMES[unit]}, and {other_example} in "
                f"{batch.file} looks like {UNIT_NAMES[other]}",
                option="log.time_unit",
                value="auto",
                remedy="convert all times to one unit, or set --log.time_unit and rows with other units are rejected",
            )
        for unit, example in plausible.items():
            self._unit = unit
            self._example_of_unit = example
        return self._unit or "s"  # all cells are blank or invalid: any unit gives the same result

    @property
    def time_unit(self) -> TimeUnit:
        """Unit of the parsed times; `iso` if all columns were Arrow timestamps, which need no unit."""
        return self._unit or "iso"

    def _record_time_hint(self, times: pa.Array, is_bad: NDArray[np.bool_]) -> None:
        if self.time_hint or not is_bad.any():
            return
        plausible = plausible_units(times.filter(pa.array(is_bad)))
        if len(plausible) == 1 and self._unit not in plausible:
            ((unit, example),) = plausible.items()
            self.time_hint = f"{example} looks like {UNIT_NAMES[unit]}. Set --log.time_unit {unit}"

    def _parse_numbers(self, batch: RawBatch, records: NDArray[Any], verdict: _Verdict) -> None:
        for name, column in self.columns.number_features().items():
            values, states = parse_numbers(batch.columns[column])
            verdict.reject(states == BAD, f"{column} {NOT_A_NUMBER}")
            if name == RATING:
                verdict.reject(states == BLANK, "missing rating")
            records[f"event_{name}"] = values

    def _parse_actions(self, batch: RawBatch, records: NDArray[Any], verdict: _Verdict) -> NDArray[np.int32]:
        mask = np.zeros(batch.num_rows, dtype=np.int32)
        for name, text in self.columns.log.actions.items():
            column, value = _action_column(text, batch.columns)
            if value is not None:
                is_set = pc.equal(_as_option_values(batch.columns[column]), value).fill_null(False)
                has_action = is_set.to_numpy(zero_copy_only=False)
                if name not in self._observed_actions:
                    self._record_values(column, batch.columns[column])
            else:
                numbers, states = parse_integers(batch.columns[column])
                verdict.reject(states == BAD, f"{column} is not a whole number")
                has_action = (numbers != 0) & (states == GOOD)
            mask |= has_action * np.int32(self.columns.action_bits[name])
            if has_action.any():
                self._observed_actions.add(name)
        if POSITIVE in self.columns.action_bits:
            is_positive = records[f"event_{RATING}"] >= np.float32(self.columns.positive_rating)
            mask |= is_positive * np.int32(self.columns.action_bits[POSITIVE])
        return mask

    def _record_values(self, column: str, cells: pa.Array) -> None:
        """Record some values of a column of actions, to suggest one if the option has a typing mistake."""
        seen = self._example_values.setdefault(column, {})
        if len(seen) < _MAX_EXAMPLE_VALUES:
            seen |= dict.fromkeys(_as_option_values(cells.drop_null().unique()[:_MAX_EXAMPLE_VALUES]).to_pylist())

    def check_actions(self) -> None:
        """Raise for actions whose value occurs in no row of the log; call this after the last batch.

        Without this check a mistyped value would look like a rare action.
        """
        errors = ErrorCollector()
        for name, text in self.columns.log.actions.items():
            column = next(
                (column for column in self._example_values if text.startswith((f"{column}:", f"{column}="))), None
            )
            if column is not None and name not in self._observed_actions:
                value = text[len(column) + 1 :]
                remedy = did_you_mean(value, [*self._example_values[column]][:_MAX_EXAMPLE_VALUES])
                errors.add(
                    f"no row has the value {value!r} in the column {column}",
                    option="log.actions",
                    value=f"{name}={text}",
                    remedy=f"{remedy} (or remove the action)",
                    error=DataError,
                )
        errors.raise_if_any()

    def _meets_min_rating(self, records: NDArray[Any], good: NDArray[np.bool_]) -> NDArray[np.bool_]:
        if self.columns.min_rating is None or not self.columns.log.rating:
            return np.ones(records.size, dtype=np.bool_)
        has_min_rating: NDArray[np.bool_] = records[f"event_{RATING}"] >= np.float32(self.columns.min_rating)
        self.num_below_rating += int((good & ~has_min_rating).sum())
        return has_min_rating

    def _encode(self, batch: RawBatch, records: NDArray[Any], keep: NDArray[np.bool_]) -> Records:
        columns = batch.columns
        if not keep.all():
            mask = pa.array(keep)
            records, columns = records[keep], {name: column.filter(mask) for name, column in columns.items()}
        log = self.columns.log
        records["user"] = self.users.encode(columns[log.user])
        records["item"] = self.items.encode(columns[log.item])
        for name in log.categories:
            records[f"event_{name}"] = encode_category(self.vocabularies[name], as_display_text(columns[name]))
        lists = {}
        for name in self.columns.list_features():
            if name in log.lists:
                ids, counts = encode_lists(self.vocabularies[name], columns[name], log.list_separator)
            else:
                hashed, counts = self._text_transform.bags(as_display_text(columns[name]))
                ids = hashed.astype(np.int32)
            lists[f"event_{name}"] = ids
            records[f"event_{name}{COUNTS_SUFFIX}"] = counts
        records["signature"] = _signatures(columns, records.size)
        return Records(records, lists)


def _signatures(columns: dict[str, pa.Array], num_rows: int) -> NDArray[np.uint64]:
    """Return the hash of each row: the one that the reader computed, otherwise the hash of the columns."""
    if SIGNATURE in columns:
        return np.asarray(columns[SIGNATURE].to_numpy(zero_copy_only=False)).view(np.uint64)
    if RAW_LINE in columns:  # pending stream rows that an earlier version stored without signatures
        return signatures_of_objects([parse_line(line) or {} for line in columns[RAW_LINE].to_pylist()])
    return event_signatures(columns, num_rows)


def _check_type(batch: RawBatch, name: str, *, is_time: bool) -> None:
    """Raise for a column of a typed file whose values cannot be ids, numbers or times."""
    kind = batch.columns[name].type
    is_no_time = any(is_kind(kind) for is_kind in _NON_TIME_TYPES)
    if pa.types.is_nested(kind) or (is_time and is_no_time):
        raise DataError(
            f"unsupported type {kind} in {batch.file}",
            option="column",
            value=name,
            remedy="name a column of text or numbers" + (", or of times" if is_time else ""),
        )


def encode_category(table: IdEncoder, column: pa.Array) -> NDArray[np.int64]:
    """Return ids from 1 in order of first appearance; 0 for a blank or null cell."""
    missing = is_missing(column)
    if not missing.any():
        return table.encode(column) + 1
    ids = np.zeros(len(column), dtype=np.int64)
    ids[~missing] = table.encode(column.filter(pa.array(~missing))) + 1
    return ids


def is_missing(column: pa.Array) -> NDArray[np.bool_]:
    """Return a mask of the cells without a value: null, NaN or empty text."""
    if pa.types.is_string(column.type) and not column.null_count:
        return np.asarray(pc.binary_length(column).to_numpy(zero_copy_only=False) == 0)
    missing = column.is_null(nan_is_null=True)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        missing = pc.or_(missing, pc.equal(column.fill_null(""), ""))
    return np.asarray(missing.to_numpy(zero_copy_only=False))


def _as_option_values(cells: pa.Array) -> pa.Array:
    """Return the cells as text as options write them: `flag:true` for the boolean true, `kind:3` for 3.0."""
    return cells.cast(pa.string()) if pa.types.is_boolean(cells.type) else as_texts(cells)


def _action_column(text: str, known: Collection[str]) -> tuple[str, str | None]:
    """Split `event:buy` or `event=buy` into the column and the value that sets the action; the value may be missing.

    Column names may contain a separator themselves: the text is split after a known column, otherwise at the first
    separator.
    """
    if text in known:
        return text, None
    separators = [index for index, character in enumerate(text) if character in ":="]
    if not separators:
        return text, None
    split = next((index for index in separators if text[:index] in known), separators[0])
    return text[:split], text[split + 1 :]


NUM_HELD_OUT_EVENTS = 2
"""Number of last events that a leave-last-out split holds out for users with three or more events."""


@dataclass(frozen=True, slots=True)
class TrainingSubset:
    """The training events that transforms are fitted on."""

    users: NDArray[np.bool_]
    """Whether each user has a training event, by code."""
    items: NDArray[np.bool_]
    """Whether each item has a training event, by code."""
    fit: TransformFit
    """Number and latest time of the training events, for the dataset card."""


def find_training_subset(
    parser: EventParser,
    partitions: KeyPartitions,
    selected: FilterResult,
    options: PrepareOptions,
    *,
    has_fitted_features: bool,
) -> TrainingSubset:
    """Fit the transforms of numeric event features, and find the users and items whose features may be fitted on.

    Reads the events once or twice, or not at all if there is nothing to fit.

    Args:
        parser: Parser that has read all events; its `transforms` are set.
        partitions: Sorted events.
        selected: Users and items that remain after filtering.
        options: Fraction or latest time of the events to fit on.
        has_fitted_features: Whether side tables have transforms to fit.

    Raises:
        DataError: No event is left to fit on.
    """
    if not has_fitted_features and not parser.columns.log.numbers:
        return TrainingSubset(selected.users, selected.items, TransformFit())
    until_ms = _fit_end_ms(parser, partitions, selected, options)
    users, items = np.zeros(selected.users.size, np.bool_), np.zeros(selected.items.size, np.bool_)
    fitters = parser.transform_fitters()
    num_events = 0
    for rows in _selected_rows(partitions, selected):
        is_fit = _is_not_held_out(rows["user"])
        if until_ms is not None:
            is_fit &= rows["time"] < until_ms
        chosen = rows.take(np.flatnonzero(is_fit))
        users[chosen["user"]], items[chosen["item"]] = True, True
        num_events += chosen.size
        for name, fitter in fitters.items():
            fitter.add(chosen[f"event_{name}"])
    if not num_events:
        if options.fit_until is None:
            raise DataError(
                "no event is left to fit transforms on, because too many events have the earliest time",
                option="fit_fraction",
                value=options.fit_fraction,
                remedy="set --fit_fraction 1 to fit on all times (except the last two events of each user)",
            )
        remedy = "set a later date, or remove --fit_until"
        raise DataError(
            "no event before this date is left to fit transforms on",
            option="fit_until",
            value=options.fit_until,
            remedy=remedy,
        )
    parser.transforms = {name: fitter.result() for name, fitter in fitters.items()}
    return TrainingSubset(users, items, TransformFit(until_ms=until_ms or 0, events=num_events))


def _fit_end_ms(
    parser: EventParser, partitions: KeyPartitions, selected: FilterResult, options: PrepareOptions
) -> int | None:
    """Return the time before which `fit_fraction` of the events occurred; None if the log has no times."""
    if "time" not in parser.field_names:
        return None
    if (fit_until_ms := options.fit_until_ms()) is not None:
        return fit_until_ms
    sample = ValueSample()
    for rows in _selected_rows(partitions, selected):
        sample.add(rows["time"])
    ordered = np.sort(sample.values())
    index = round(options.fit_fraction * ordered.size)
    return int(ordered[index]) if index < ordered.size else int(ordered[-1]) + 1


def _selected_rows(partitions: KeyPartitions, selected: FilterResult) -> Iterator[NDArray[Any]]:
    """Yield the records of the selected users and items, sorted by user and then by the order of their events."""
    for p in range(len(partitions)):
        rows = partitions[p].load_rows()
        is_selected = selected.users[rows["user"]] & selected.items[rows["item"]]
        yield rows if is_selected.all() else rows.take(np.flatnonzero(is_selected))


def _is_not_held_out(users: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask of the events that a leave-last-out split never holds out."""
    _, counts = np.unique(users, return_counts=True)
    length = np.repeat(counts, counts)
    position = np.arange(users.size) - np.repeat(offsets_of_lengths(counts)[:-1], counts)
    is_training: NDArray[np.bool_] = (length <= NUM_HELD_OUT_EVENTS) | (position < length - NUM_HELD_OUT_EVENTS)
    return is_training
