"""Raw rows to event records: checked, filtered by rating, with dense codes for users, items and categories.

The events from which transforms are learnt: those that train whether a run splits by time or by last events.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterator
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
from nestrec.data.prepare.list_cells import MARK as LIST_MARK
from nestrec.data.prepare.list_cells import encode_lists, event_signatures, has_marks, joined, signatures_of_objects
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
from nestrec.data.prepare.raw_rows import SIGNATURE, WHOLE_LINE, BadRow, RawBatch
from nestrec.data.prepare.spill_files import KeyPartitions, Records
from nestrec.data.prepare.transform_fitting import TransformFitter, ValueSample, bucket_labels
from nestrec.data.transform import Transform

POSITIVE = "positive"
RATING = "rating"
MAX_ACTIONS = 31
"""Datasets store the actions of an event as the bits of a signed integer of 32 bits."""
_NO_TIMES = (pa.types.is_boolean, pa.types.is_time, pa.types.is_duration)
_VALUES_TOLD = 20


@dataclass(frozen=True, slots=True)
class EventColumns:
    """What to take from each raw row."""

    log: LogColumns
    action_bits: dict[str, int] = field(default_factory=dict)
    """Bit of each action of `log.actions`, and of `positive` where ratings give it."""
    min_rating: float | None = None
    positive_rating: float | None = None

    def __post_init__(self) -> None:
        log = self.log
        rating = [RATING] if log.rating else []
        named = [*rating, *log.values, *log.numbers, *log.categories, *log.lists, *log.texts]
        for name, count in Counter(named).items():
            if count > 1:
                remedy = "name it in one of log.categories, lists, numbers, texts and values"
                raise UserError("is named more than once", option="log", value=name, remedy=remedy)
        for column in (log.rating, *log.values.values()):
            if column in (*log.numbers, *log.categories, *log.lists, *log.texts):
                raise UserError(
                    "is told only when its event is over (log.values, log.rating), and is named as known before, too",
                    option="log",
                    value=column,
                    remedy="name it once: models would read the answer of the event that they predict",
                )
        if len(self.action_bits) > MAX_ACTIONS:
            raise UserError(
                f"gives {len(self.action_bits)} actions, `positive` included; a dataset holds at most {MAX_ACTIONS}",
                option="log.actions",
                value=", ".join(self.action_bits),
                remedy="leave some out, or name their column in --log.categories",
            )
        if log.user == log.item:
            raise UserError(
                "is the column of users, too", option="log.item", value=log.item, remedy="name the column of items"
            )
        for name in self.list_features():
            if (clash := name + COUNTS_SUFFIX) in named:
                problem = f"is what the dataset calls how many values of {name!r} each event has"
                raise UserError(problem, option="log", value=clash, remedy="give the column another name")
        for name in log.transforms:
            if name not in log.numbers:
                remedy = did_you_mean(name, log.numbers) if log.numbers else "name it in --log.numbers"
                raise UserError("is no number of the log", option="log.transforms", value=name, remedy=remedy)

    @staticmethod
    def of(log: LogColumns, *, min_rating: float | None = None, positive_rating: float | None = None) -> "EventColumns":
        """Bits in the order of the actions, `positive` last."""
        names = [*log.actions, *([POSITIVE] if log.rating and positive_rating is not None else [])]
        return EventColumns(log, {name: 1 << i for i, name in enumerate(names)}, min_rating, positive_rating)

    def wanted(self, known: Collection[str] = ()) -> list[str]:
        """The columns that are read, those of actions as they are named among the `known` ones."""
        log = self.log
        actions = [_action_column(text, known)[0] for text in log.actions.values()]
        features = [*log.values.values(), *log.numbers, *log.categories, *log.lists, *log.texts]
        named = [log.user, log.item, log.time, log.position, log.rating, *actions, *features]
        return [name for name in named if name is not None]

    def needed(self) -> list[str]:
        """Those without which no row can be read; an action's is looked for among the columns that there are."""
        return replace(self, log=replace(self.log, actions={})).wanted()

    def sort_fields(self) -> list[str]:
        return [name for name in ("time", "position") if getattr(self.log, name)]

    def number_features(self) -> dict[str, str]:
        """Feature name to column."""
        rating = {RATING: self.log.rating} if self.log.rating else {}
        return {**rating, **self.log.values, **{name: name for name in self.log.numbers}}

    def list_features(self) -> tuple[str, ...]:
        """Those with several ids an event."""
        return (*self.log.lists, *self.log.texts)

    def dtype(self) -> np.dtype[Any]:
        """Of an event record."""
        fields: list[tuple[str, str]] = [("user", "i4"), ("item", "i4"), ("signature", "u8")]
        fields += [(name, "i8") for name in self.sort_fields()]
        fields += [("actions", "i4")] if self.action_bits else []
        fields += [(f"event_{name}", "f4") for name in self.number_features()]
        fields += [(f"event_{name}", "i4") for name in self.log.categories]
        fields += [(f"event_{name}{COUNTS_SUFFIX}", "i4") for name in self.list_features()]
        return np.dtype(fields)

    def lists(self) -> dict[str, np.dtype[Any]]:
        """Lists of an event record."""
        return {f"event_{name}": np.dtype(np.int32) for name in self.list_features()}


class _Verdict:
    """The first reason for which each row of a batch is bad."""

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
        return [BadRow(int(batch.lines[i]), self._reasons[self._reason_of_row[i]], batch.text_of(int(i))) for i in bad]


class EventParser:
    """Parses batches in input order and owns the tables of users, items and category values."""

    def __init__(self, columns: EventColumns):
        self.columns = columns
        self.dtype = columns.dtype()
        self.field_names = self.dtype.names or ()
        self.users, self.items = IdEncoder(), IdEncoder()
        self.vocabularies = {name: IdEncoder() for name in (*columns.log.categories, *columns.log.lists)}
        self.transforms: dict[str, Transform] = {}
        """Of the numbers, as soon as they are fitted."""
        self._ngrams = columns.log.hashing.transform()
        ahead_s = columns.log.max_ahead_s
        self._latest_ms = LATEST_TIME_MS if ahead_s is None else round(1000 * (time.time() + ahead_s))
        self.time_hint = ""
        """What the times look like that the unit does not fit; for the error."""
        self._unit: TimeUnit | None = None if columns.log.time_unit == "auto" else columns.log.time_unit
        self._example_of_unit = ""
        self.num_below_rating = 0
        self._actions_met: set[str] = set()
        self._values: dict[str, dict[str, None]] = {}

    def parse(self, batch: RawBatch) -> tuple[Records, list[BadRow]]:
        """Records of the good rows in order, and the bad rows."""
        self._check_names(batch)
        records = np.zeros(batch.num_rows, dtype=self.dtype)
        verdict = _Verdict(batch.num_rows)
        log = self.columns.log
        for name, what in ((log.user, "user"), (log.item, "item")):
            verdict.reject(is_missing(batch.columns[name]), f"missing {what}")
            if WHOLE_LINE in batch.columns and has_marks(batch.columns[name]):
                verdict.reject(
                    pc.match_substring(batch.columns[name], LIST_MARK).to_numpy(zero_copy_only=False),
                    f"{what} is a list",
                )
        self._parse_order(batch, records, verdict)
        self._parse_numbers(batch, records, verdict)
        if self.columns.action_bits:
            records["actions"] = self._parse_actions(batch, records, verdict)
        keep = verdict.good() & self._is_rated_enough(records, verdict.good())
        return self._encode(batch, records, keep), verdict.bad_rows(batch)

    def fittings(self) -> dict[str, TransformFitter]:
        """What is to be learnt of the numbers that models may read."""
        log = self.columns.log
        return {name: TransformFitter(log.transforms.get(name, "quantiles"), log.num_buckets) for name in log.numbers}

    def features(self) -> tuple[Feature, ...]:
        """Descriptions of the event features, for the card."""
        log = self.columns.log
        features = [
            Feature(name=n, kind="number", known="after")
            for n in self.columns.number_features()
            if n not in log.numbers
        ]
        for name in log.numbers:
            transform = self.transforms[name]
            is_cut = transform.kind == "quantiles"
            size = len(transform.bounds) + 1 if is_cut else 0
            features.append(
                Feature(name=name, kind="category" if is_cut else "number", vocabulary_size=size, transform=transform)
            )
        for name, table in self.vocabularies.items():
            kind: FeatureKind = "category" if name in log.categories else "categories"
            features.append(Feature(name=name, kind=kind, vocabulary_size=len(table) + 1))
        size = self._ngrams.buckets
        bags = [Feature(name=n, kind="bag", vocabulary_size=size, transform=self._ngrams) for n in log.texts]
        return (*features, *bags)

    def category_keys(self) -> dict[str, pa.Array]:
        """Keys of the category features, in order of id from 1."""
        cut = {name: t for name, t in self.transforms.items() if t.kind == "quantiles"}
        return {
            **{name: table.all_keys() for name, table in self.vocabularies.items()},
            **{name: pa.array(bucket_labels(transform), pa.string()) for name, transform in cut.items()},
        }

    def is_cut(self, name: str) -> bool:
        """Whether models read the bucket of a number, by its field in a record."""
        transform = self.transforms.get(name.removeprefix(EVENT_PREFIX))
        return transform is not None and transform.kind == "quantiles"

    def bucket_ids(self, name: str, values: NDArray[Any]) -> NDArray[np.int64] | None:
        """Ids of the values of a column that is cut into buckets; none for others."""
        return self.transforms[name.removeprefix(EVENT_PREFIX)].bucket_ids(values) if self.is_cut(name) else None

    def _check_names(self, batch: RawBatch) -> None:
        log = self.columns.log
        mistakes = ErrorCollector()
        for name in self.columns.wanted(batch.columns):
            with mistakes.collecting():
                if name not in batch.columns:
                    hint = " (is the separator right? --log.separator ';')" if len(batch.names) == 1 else ""
                    raise DataError(
                        f"is no column of {batch.file}",
                        option="column",
                        value=name,
                        remedy=did_you_mean(name, batch.names) + hint,
                    )
                if name not in log.lists:
                    _check_type(batch, name, is_time=name in (log.time, log.position))
        mistakes.raise_if_any()

    def _parse_order(self, batch: RawBatch, records: NDArray[Any], verdict: _Verdict) -> None:
        log = self.columns.log
        if log.time:
            times_ms, states, out_of_range = parse_times_ms(batch.columns[log.time], self._unit_of(batch))
            verdict.reject(states == BLANK, "missing time")
            verdict.reject(states == BAD, NOT_A_TIME)
            verdict.reject(out_of_range, OUT_OF_RANGE)
            verdict.reject(times_ms > self._latest_ms, AHEAD)
            self._note_hint(batch.columns[log.time], (states == BAD) | out_of_range | (times_ms > self._latest_ms))
            records["time"] = times_ms
        if log.position:
            positions, states = parse_integers(batch.columns[log.position])
            verdict.reject(states != GOOD, "position is not a whole number")
            records["position"] = positions

    def _unit_of(self, batch: RawBatch) -> TimeUnit:
        """Returns the unit of a batch's times: the one that was set, or that of the first times with a plausible one.

        Once inferred, it holds for all batches. Raises if the times of a batch look like those of another unit.
        """
        log = self.columns.log
        if log.time_unit != "auto":
            return log.time_unit
        assert log.time is not None
        times = batch.columns[log.time]
        found = plausible_units(times)
        if not found and self._unit is None and (number := first_number(times)) is not None:
            found = {"s": number}
        if self._unit is not None:
            found = {self._unit: self._example_of_unit, **found}
        if len(found) > 1:
            (unit, example), (other, its_example) = list(found.items())[:2]
            raise DataError(
                f"{example} looks like {UNIT_NAMES[unit]} and {its_example} in {batch.file} like {UNIT_NAMES[other]}",
                option="log.time_unit",
                value="auto",
                remedy="bring all times to one unit, or set --log.time_unit: times of other units become bad rows",
            )
        for unit, example in found.items():
            self._unit = unit
            self._example_of_unit = example
        return self._unit or "s"  # of cells that are all blank or no times

    @property
    def time_unit(self) -> TimeUnit:
        """The unit of the times that were read; `iso` if they were all timestamps, which need none."""
        return self._unit or "iso"

    def _note_hint(self, times: pa.Array, is_bad: NDArray[np.bool_]) -> None:
        if self.time_hint or not is_bad.any():
            return
        found = plausible_units(times.filter(pa.array(is_bad)))
        if len(found) == 1 and self._unit not in found:
            ((unit, example),) = found.items()
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
                is_set = pc.equal(_named_values(batch.columns[column]), value).fill_null(False)
                is_done = is_set.to_numpy(zero_copy_only=False)
                if name not in self._actions_met:
                    self._note_values(column, batch.columns[column])
            else:
                numbers, states = parse_integers(batch.columns[column])
                verdict.reject(states == BAD, f"{column} is not a whole number")
                is_done = (numbers != 0) & (states == GOOD)
            mask |= is_done * np.int32(self.columns.action_bits[name])
            if is_done.any():
                self._actions_met.add(name)
        if POSITIVE in self.columns.action_bits:
            is_positive = records[f"event_{RATING}"] >= np.float32(self.columns.positive_rating)
            mask |= is_positive * np.int32(self.columns.action_bits[POSITIVE])
        return mask

    def _note_values(self, column: str, cells: pa.Array) -> None:
        """Some values of a column that tells actions, for people who mistyped one."""
        seen = self._values.setdefault(column, {})
        if len(seen) < _VALUES_TOLD:
            seen |= dict.fromkeys(_named_values(cells.drop_null().unique()[:_VALUES_TOLD]).to_pylist())

    def check_actions(self) -> None:
        """After a whole log: refuse an action by a value that no row of it has, which nothing else would tell from a
        rare one."""
        mistakes = ErrorCollector()
        for name, text in self.columns.log.actions.items():
            column = next((column for column in self._values if text.startswith((f"{column}:", f"{column}="))), None)
            if column is not None and name not in self._actions_met:
                value = text[len(column) + 1 :]
                remedy = did_you_mean(value, [*self._values[column]][:_VALUES_TOLD])
                mistakes.add(
                    f"no row has {value!r} in the column {column}",
                    option="log.actions",
                    value=f"{name}={text}",
                    remedy=f"{remedy} (or leave the action out)",
                    error=DataError,
                )
        mistakes.raise_if_any()

    def _is_rated_enough(self, records: NDArray[Any], good: NDArray[np.bool_]) -> NDArray[np.bool_]:
        if self.columns.min_rating is None or not self.columns.log.rating:
            return np.ones(records.size, dtype=np.bool_)
        is_enough: NDArray[np.bool_] = records[f"event_{RATING}"] >= np.float32(self.columns.min_rating)
        self.num_below_rating += int((good & ~is_enough).sum())
        return is_enough

    def _encode(self, batch: RawBatch, records: NDArray[Any], keep: NDArray[np.bool_]) -> Records:
        columns = batch.columns
        if not keep.all():
            mask = pa.array(keep)
            records, columns = records[keep], {name: column.filter(mask) for name, column in columns.items()}
        log = self.columns.log
        records["user"] = self.users.encode(columns[log.user])
        records["item"] = self.items.encode(columns[log.item])
        for name in log.categories:
            records[f"event_{name}"] = encode_category(self.vocabularies[name], joined(columns[name]))
        lists = {}
        for name in self.columns.list_features():
            if name in log.lists:
                ids, counts = encode_lists(self.vocabularies[name], columns[name], log.list_separator)
            else:
                hashed, counts = self._ngrams.bags(joined(columns[name]))
                ids = hashed.astype(np.int32)
            lists[f"event_{name}"] = ids
            records[f"event_{name}{COUNTS_SUFFIX}"] = counts
        records["signature"] = _signatures(columns, records.size)
        return Records(records, lists)


def _signatures(columns: dict[str, pa.Array], num_rows: int) -> NDArray[np.uint64]:
    """Returns the hash of each row: the reader's where it gives one, else that of the columns."""
    if SIGNATURE in columns:
        return np.asarray(columns[SIGNATURE].to_numpy(zero_copy_only=False)).view(np.uint64)
    if WHOLE_LINE in columns:  # lines that an earlier version left waiting in a stream
        return signatures_of_objects([parse_line(line) or {} for line in columns[WHOLE_LINE].to_pylist()])
    return event_signatures(columns, num_rows)


def _check_type(batch: RawBatch, name: str, *, is_time: bool) -> None:
    """Refuse columns of a typed file whose values are no ids, numbers or times."""
    kind = batch.columns[name].type
    is_no_time = any(is_kind(kind) for is_kind in _NO_TIMES)
    if pa.types.is_nested(kind) or (is_time and is_no_time):
        raise DataError(
            f"is of type {kind} in {batch.file}",
            option="column",
            value=name,
            remedy="name a column of text or numbers" + (", or of times" if is_time else ""),
        )


def encode_category(table: IdEncoder, column: pa.Array) -> NDArray[np.int64]:
    """Ids from 1 in order of first appearance; 0 for a blank or a null."""
    missing = is_missing(column)
    if not missing.any():
        return table.encode(column) + 1
    ids = np.zeros(len(column), dtype=np.int64)
    ids[~missing] = table.encode(column.filter(pa.array(~missing))) + 1
    return ids


def is_missing(column: pa.Array) -> NDArray[np.bool_]:
    """Cells that hold nothing: null, NaN or an empty text."""
    if pa.types.is_string(column.type) and not column.null_count:
        return np.asarray(pc.binary_length(column).to_numpy(zero_copy_only=False) == 0)
    missing = column.is_null(nan_is_null=True)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        missing = pc.or_(missing, pc.equal(column.fill_null(""), ""))
    return np.asarray(missing.to_numpy(zero_copy_only=False))


def _named_values(cells: pa.Array) -> pa.Array:
    """Cells as an option names them: `flag:true` for what a typed file holds as true, `kind:3` for 3.0."""
    return cells.cast(pa.string()) if pa.types.is_boolean(cells.type) else as_texts(cells)


def _action_column(text: str, known: Collection[str]) -> tuple[str, str | None]:
    """Column, and the value that sets the action where one is named: `event:buy` or `event=buy`.

    Names of columns may hold these signs themselves: it is cut where a known column ends, or else at the first sign.
    """
    if text in known:
        return text, None
    cuts = [place for place, sign in enumerate(text) if sign in ":="]
    if not cuts:
        return text, None
    cut = next((place for place in cuts if text[:place] in known), cuts[0])
    return text[:cut], text[cut + 1 :]


HELD_OUT = 2
"""Last events of a user that leave-one-out holds out, where there are three or more."""


@dataclass(frozen=True, slots=True)
class TrainingSubset:
    """Flags by code of the users and items that have events there."""

    users: NDArray[np.bool_]
    items: NDArray[np.bool_]
    fit: TransformFit


def find_training_part(
    parser: EventParser, partitions: KeyPartitions, kept: FilterResult, options: PrepareOptions, *, is_asked: bool
) -> TrainingSubset:
    """Learn the transforms of the events' numbers, and find whose features may be learnt from: a pass or two.

    is_asked: whether side tables have something to learn, too; no pass is made where there is nothing.
    """
    if not is_asked and not parser.columns.log.numbers:
        return TrainingSubset(kept.users, kept.items, TransformFit())
    until_ms = _until_ms(parser, partitions, kept, options)
    users, items = np.zeros(kept.users.size, np.bool_), np.zeros(kept.items.size, np.bool_)
    fittings = parser.fittings()
    num_events = 0
    for rows in _kept_rows(partitions, kept):
        is_fit = _is_early(rows["user"])
        if until_ms is not None:
            is_fit &= rows["time"] < until_ms
        chosen = rows.take(np.flatnonzero(is_fit))
        users[chosen["user"]], items[chosen["item"]] = True, True
        num_events += chosen.size
        for name, fitting in fittings.items():
            fitting.add(chosen[f"event_{name}"])
    if not num_events:
        if options.fit_until is None:
            raise DataError(
                "leaves no event to learn from: so many of the events have the earliest time",
                option="fit_share",
                value=options.fit_share,
                remedy="--fit_share 1 learns from all times (but not from the last two events of a user)",
            )
        remedy = "give a later date, or leave it out"
        raise DataError("leaves no event to learn from", option="fit_until", value=options.fit_until, remedy=remedy)
    parser.transforms = {name: fitting.result() for name, fitting in fittings.items()}
    return TrainingSubset(users, items, TransformFit(until_ms=until_ms or 0, events=num_events))


def _until_ms(
    parser: EventParser, partitions: KeyPartitions, kept: FilterResult, options: PrepareOptions
) -> int | None:
    """The moment before which the share of events lies; none where the log has no times."""
    if "time" not in parser.field_names:
        return None
    if (given := options.fit_until_ms()) is not None:
        return given
    sample = ValueSample()
    for rows in _kept_rows(partitions, kept):
        sample.add(rows["time"])
    ordered = np.sort(sample.values())
    place = round(options.fit_share * ordered.size)
    return int(ordered[place]) if place < ordered.size else int(ordered[-1]) + 1


def _kept_rows(partitions: KeyPartitions, kept: FilterResult) -> Iterator[NDArray[Any]]:
    """Records of the events that stay, all of a user together, users and their events in order."""
    for p in range(len(partitions)):
        rows = partitions[p].load_rows()
        stays = kept.users[rows["user"]] & kept.items[rows["item"]]
        yield rows if stays.all() else rows.take(np.flatnonzero(stays))


def _is_early(users: NDArray[Any]) -> NDArray[np.bool_]:
    """All but the last two events of each user that has three or more."""
    _, counts = np.unique(users, return_counts=True)
    length = np.repeat(counts, counts)
    place = np.arange(users.size) - np.repeat(offsets_of_lengths(counts)[:-1], counts)
    early: NDArray[np.bool_] = (length <= HELD_OUT) | (place < length - HELD_OUT)
    return early
