"""Equal ids get equal texts, and equal times equal milliseconds, in every file format and column type."""

import csv
import itertools
import json
import random
from decimal import ROUND_FLOOR, Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from nestrec.base.errors import DataError, UserError
from nestrec.cli.app import app
from nestrec.data.dataset import Dataset
from nestrec.data.dataset_card import DatasetCard
from nestrec.data.formats.format_registry import prepare
from nestrec.data.formats.log_format import LogOptions, open_log
from nestrec.data.incremental.append import append
from nestrec.data.prepare import raw_rows
from nestrec.data.prepare.event_parser import EventParser
from nestrec.data.prepare.parse import BAD, GOOD, UNIT_NAMES, parse_integers, parse_times_ms
from nestrec.data.prepare.prepare_options import LogColumns
from nestrec.data.streaming.ingester import StreamIngester, open_stream_source, stream_log_options
from nestrec.data.streaming.window_policy import WindowRule

UNITS = {"s": 3, "ms": 0, "us": -3, "ns": -6}
MOMENT_NS = 1_700_000_000_123_456_789


def exact_ms(number: str | Decimal, unit: str) -> int:
    """Reference implementation: rounds the exact decimal number down to milliseconds."""
    return int(Decimal(number).scaleb(UNITS[unit]).to_integral_value(ROUND_FLOOR))


@pytest.mark.parametrize("kind", [pa.int64(), pa.uint64(), pa.string(), pa.decimal128(38, 2)], ids=str)
@pytest.mark.parametrize("unit", ["us", "ns"])
def test_times_large_integers_stay_exact(unit: str, kind: pa.DataType) -> None:
    step = 10 ** -UNITS[unit]
    edges = [n * step + d for n in (2**53 + 1, 7 * 10**12 - 1) for d in (-1, 0, 1, step - 1) if n * step < 2**63]
    edges += [MOMENT_NS, MOMENT_NS // 10**6 * 10**6 - 1]
    times, states, _ = parse_times_ms(pa.array(map(Decimal, edges)).cast(kind), unit)
    assert times.tolist() == [edge // step for edge in edges]
    assert (states == GOOD).all()


@pytest.mark.parametrize("count", [1_700_000_000_123, 1_700_000_000_001, 999, 4_102_444_799_999])
def test_times_fractions_of_seconds_are_exact_in_every_type(count: int) -> None:
    number = Decimal(count).scaleb(-3)
    columns = [pa.array([str(number)]), pa.array([float(number)]), pa.array([number]), pa.array([f"{number:e}"])]
    assert [parse_times_ms(column, "s")[0].item() for column in columns] == [count] * 4


@given(numbers=st.lists(st.floats(0, 7e9), min_size=1, max_size=50), unit=st.sampled_from(["s", "ms"]))
def test_times_of_floats_equal_those_of_their_text(numbers: list[float], unit: str) -> None:
    times = parse_times_ms(pa.array(numbers), unit)[0]
    assert times.tolist() == [exact_ms(repr(number), unit) for number in numbers]
    assert times.tolist() == parse_times_ms(pa.array(map(repr, numbers)), unit)[0].tolist()


@given(
    text=st.from_regex(r"\A\s?[+-]?([0-9]{0,25}\.?[0-9]{0,9})([eE][+-]?[0-9]{1,2})?\s?\Z"),
    unit=st.sampled_from(list(UNITS)),
)
def test_times_of_any_text_equal_exact_decimals(text: str, unit: str) -> None:
    times, states, out_of_range = parse_times_ms(pa.array(["7", text]), unit)
    try:
        expected = exact_ms(text.strip(), unit)
    except ArithmeticError:
        assert states[1] != GOOD
        return
    assert states[1] == GOOD
    assert times[1] == max(min(expected, 2**63 - 1), 1 - 2**63)
    assert out_of_range[1] == (not 0 <= expected < 7_258_118_400_000)


@pytest.mark.parametrize("text", ["0x10", "0X1A", "1_000", "١٢", "1e", "e5", ".", "+-1", "inf", "12abc"])
def test_times_and_integers_accept_decimal_digits_only(text: str) -> None:
    for cells in ([text], ["16", text], [text, "16"]):
        row = cells.index(text)
        assert parse_times_ms(pa.array(cells), "s")[1][row] == BAD
        assert parse_integers(pa.array(cells))[1][row] == BAD


def test_integers_parse_the_same_with_any_neighbors() -> None:
    for text, value in {str(2**62 + 1): 2**62 + 1, "12.0": 12, "1e3": 1000, "-7": -7}.items():
        for neighbors in ([], ["x"], ["1.5"], [""]):
            values, states = parse_integers(pa.array([text, *neighbors]))
            assert (values[0], states[0]) == (value, GOOD)
    assert np.array_equal(parse_integers(pa.array([str(2**63), "1.5", "2"]))[1], [BAD, BAD, GOOD])


MOMENT_MS = 1_700_000_000_123
IN_UNIT = {
    "s": "1700000000.123",
    "ms": "1700000000123",
    "us": "1700000000123456",
    "ns": "1700000000123456789",
    "iso": "2023-11-14T22:13:20.123+00:00",
}


def write_csv(file: Path, *times: str) -> Path:
    file.write_text("user,item,t\n" + "".join(f"u,{row},{time}\n" for row, time in enumerate(times)))
    return file


def times_of(folder: Path) -> list[int]:
    return Dataset.open(folder).rows(np.zeros(1, np.int64)).lists["timestamps_ms"][0].tolist()


@pytest.mark.parametrize("unit", IN_UNIT)
def test_time_unit_is_inferred_and_printed(tmp_path: Path, unit: str) -> None:
    write_csv(tmp_path / "log.csv", "", *[IN_UNIT[unit]] * 200, "0")
    out = tmp_path / "out"
    shown = CliRunner().invoke(app, ["prepare", "log", str(tmp_path / "log.csv"), str(out), "--log.time", "t"])
    assert shown.exit_code == 0, shown.output
    assert f"time unit: {unit} (" in shown.output
    assert DatasetCard.load(out).options["log"]["time_unit"] == unit
    assert set(times_of(out)) <= {MOMENT_MS, 0}


def test_time_unit_without_plausible_years_is_seconds(tmp_path: Path) -> None:
    card = prepare("log", write_csv(tmp_path / "log.csv", "5", "7.5"), tmp_path / "out", **{"log.time": "t"})
    assert (card.options["log"]["time_unit"], times_of(tmp_path / "out")) == ("s", [5000, 7500])


def test_time_unit_ambiguous_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    for first, second in itertools.permutations(IN_UNIT, 2):
        both = write_csv(tmp_path / "both.csv", IN_UNIT[first], IN_UNIT[second])
        write_csv(tmp_path / "log" / "1.csv", IN_UNIT[first])
        write_csv(tmp_path / "log" / "2.csv", IN_UNIT[second])
        for source in (both, tmp_path / "log"):
            with pytest.raises(DataError, match=r"looks like .*, and .* looks like .*--log.time_unit"):
                prepare("log", source, tmp_path / "out", **{"log.time": "t"})


@pytest.mark.parametrize("unit", ["ms", "us", "ns", "iso"])
def test_time_unit_wrong_is_corrected_in_the_error(tmp_path: Path, unit: str) -> None:
    source = write_csv(tmp_path / "log.csv", IN_UNIT[unit], IN_UNIT[unit])
    with pytest.raises(DataError) as raised:
        prepare("log", source, tmp_path / "out", **{"log.time": "t", "log.time_unit": "s"})
    assert f"{IN_UNIT[unit]} looks like {UNIT_NAMES[unit]}. Set --log.time_unit {unit}" in raised.value.remedy


def test_time_unit_of_typed_timestamps_is_not_inferred(tmp_path: Path) -> None:
    moments = pa.array([MOMENT_MS, 5], pa.timestamp("ms"))
    pq.write_table(pa.table({"user": ["u", "u"], "item": [1, 2], "t": moments}), tmp_path / "log.parquet")
    card = prepare("log", tmp_path / "log.parquet", tmp_path / "out", **{"log.time": "t"})
    assert card.options["log"]["time_unit"] == "iso"
    append(write_csv(tmp_path / "more.csv", IN_UNIT["iso"]), tmp_path / "out")
    assert times_of(tmp_path / "out") == [5, MOMENT_MS, MOMENT_MS]


def test_time_unit_of_appended_events_is_that_of_the_dataset(tmp_path: Path) -> None:
    """On their own, the times of the new files would be inferred to be seconds."""
    folder = tmp_path / "out"
    prepare("log", write_csv(tmp_path / "log.csv", "1700000000123"), folder, **{"log.time": "t"})
    append(write_csv(tmp_path / "more.csv", "1700000000"), folder)
    (tmp_path / "incoming").mkdir()
    write_csv(tmp_path / "incoming" / "1.csv", "1700000001")
    for log in (None, LogColumns(time="t")):
        options = stream_log_options(DatasetCard.load(folder), log, 1.0)
        assert options.log.time_unit == "ms"
    source = open_stream_source(str(tmp_path / "incoming"), options)
    StreamIngester(source, str(tmp_path / "incoming"), folder, WindowRule(events=1), options).next_window(lambda: True)
    assert times_of(folder) == [1700000000, 1700000001, MOMENT_MS]


def test_time_unit_of_a_stream_is_required_if_unknown(tmp_path: Path) -> None:
    card = prepare("synthetic", "tiny", tmp_path / "out", num_users=4)
    with pytest.raises(UserError, match=r"--log.time_unit s, ms, us, ns or iso"):
        stream_log_options(card, LogColumns(time="t"), 1.0)
    assert stream_log_options(card, LogColumns(), 1.0).log.time is None


TEXTS = (
    "007",
    "+7",
    "1.0",
    "-0",
    "0x10",
    "1e5",
    "nan",
    "None",
    "true",
    "b c",
    "\u2603",
    "\U0001f600",
    "it's",
    "0xE8D4A50FFF",
)
FRACTIONS = (0.5, 7.25, 1e-7, 0.1, 123456.789, 1e15 + 0.5)
INTEGERS = (0, 7, -3, 16, 10**10, 999_999_999_999, 2**53 - 1, 10**15)
LARGE = (2**53 + 1, 10**17, 10**18, 2**63 - 1, -(2**63))
HUGE = (2**63, 10**20, 10**30)
FORMATS = ("log.csv", "log.tsv", "log.dat", "log.jsonl", "log.parquet", "table")


def exact_text(value: Any) -> str:
    """Reference implementation: returns the text of an id, with all digits of the value."""
    if isinstance(value, str):
        return value
    exact = value if isinstance(value, Decimal) else Decimal(repr(value))
    return str(int(value)) if value == int(value) else format(exact, "f")


def random_ids(draw: random.Random, num_rows: int) -> list[Any]:
    """Returns one column of ids: integers, floats with and without a fraction, or texts."""
    pool = draw.choice(
        [TEXTS, INTEGERS, INTEGERS + LARGE, INTEGERS + LARGE + HUGE, tuple(map(float, INTEGERS)) + FRACTIONS]
    )
    return [draw.choice(pool) for _ in range(num_rows)]


def random_times(draw: random.Random, num_rows: int) -> tuple[str, list[int | float | Decimal]]:
    """Returns a unit, and one column of times in it, with a fraction or without; decimals if no float holds them."""
    unit = draw.choice(list(UNITS))
    moments = [draw.randrange(10**12, 1_700_000_000_000) for _ in range(num_rows)]
    digits = draw.choice([3, 3, 6, 9])  # fractional digits of a second
    exact = [Decimal(ms).scaleb(digits - 3) + draw.choice([0, 0, 10 ** (digits - 3) - 1]) for ms in moments]
    exact = [time.scaleb(3 - UNITS[unit] - digits) for time in exact]
    if all(time == int(time) for time in exact):
        return unit, [int(time) for time in exact]
    return unit, [float(time) if Decimal(repr(float(time))) == time else time for time in exact]


def typed_column(draw: random.Random, values: list[Any]) -> pa.Array:
    """Returns a column of a random type that holds the values exactly."""
    texts = [exact_text(value) for value in values]
    candidates = [
        lambda: pa.array(values, pa.int64()),
        lambda: pa.array(values, pa.uint64()),
        lambda: pa.array([float(value) for value in values]),
        lambda: pa.array([float(value) for value in values], pa.float32()),
        lambda: pa.array([Decimal(text) for text in texts], pa.decimal128(38, draw.choice([0, 3, 7]))),
        lambda: pa.array([Decimal(text) for text in texts], pa.decimal256(60, 9)),
        lambda: pa.array(texts),
        lambda: pa.array(texts, pa.large_string()),
        lambda: pa.array(texts).dictionary_encode(),
        lambda: pa.array(values).dictionary_encode(),
    ]
    while True:
        try:
            column = draw.choice(candidates)()
            decoded = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
            # Text can represent any id; another type is accepted only if its values are the same numbers.
            if pa.types.is_string(decoded.type) or pa.types.is_large_string(decoded.type):
                return column
            if not isinstance(values[0], str) and all(map(_is_same_number, decoded.to_pylist(), values)):
                return column
        except (pa.ArrowException, ArithmeticError, ValueError, TypeError, OverflowError):
            continue


def _is_same_number(decoded: Any, value: Any) -> bool:
    return Decimal(exact_text(decoded)) == Decimal(exact_text(value))


def json_value(draw: random.Random, value: Any) -> Any:
    """Returns a value as a number of JSON or as text."""
    return exact_text(value) if isinstance(value, str | Decimal) or draw.random() < 0.5 else value


def write_log(draw: random.Random, folder: Path, name: str, columns: dict[str, list[Any]]) -> Any:
    """Writes columns in the format of `name`, or returns them as a table in memory."""
    texts = [[exact_text(value) for value in column] for column in columns.values()]
    rows = list(zip(*texts, strict=True))
    file = folder / name
    if name in ("log.csv", "log.tsv"):
        with file.open("w", newline="") as stream:
            csv.writer(stream, delimiter="," if name == "log.csv" else "\t").writerows([[*columns], *rows])
    elif name == "log.dat":
        file.write_text("".join("::".join(row) + "\n" for row in [[*columns], *rows]))
    elif name == "log.jsonl":
        with file.open("w") as stream:
            for row in zip(*columns.values(), strict=True):
                stream.write(json.dumps(dict(zip(columns, (json_value(draw, v) for v in row), strict=True))) + "\n")
    else:
        table = pa.table({column: typed_column(draw, values) for column, values in columns.items()})
        if name == "table":
            return table
        pq.write_table(table, file, row_group_size=draw.choice([2, 5, 100]))
    return file


def parse_log(file: Path, log: LogColumns) -> list[tuple[Any, ...]]:
    """Returns the events that `prepare` reads from a file, in the order of `read_dataset`."""
    source = open_log(file, LogOptions(log=log))
    parser = EventParser(source.columns)
    events: list[tuple[Any, ...]] = []
    for batch, _ in source.checked_batches():
        records, bad = parser.parse(batch)
        assert not bad
        rows = records.rows
        columns = [parser.users.keys(rows["user"]).to_pylist(), parser.items.keys(rows["item"]).to_pylist()]
        columns.append(rows["time"].tolist())
        columns += [parser.vocabularies[name].keys(rows[f"event_{name}"] - 1).to_pylist() for name in log.categories]
        events += zip(*columns, strict=True)
    return sorted(events)


def read_dataset(folder: Path) -> list[tuple[Any, ...]]:
    """Returns the events of a dataset: user, item, time and the texts of the other columns, in its order."""
    dataset = Dataset.open(folder)
    rows = dataset.rows(np.arange(dataset.num_samples))
    users = np.repeat(rows.indices, np.diff(rows.lists["item_ids"][1]))
    columns = [
        dataset.user_keys(users),
        [dataset.items().column("item_key")[i - 1].as_py() for i in rows.lists["item_ids"][0]],
    ]
    columns.append(rows.lists["timestamps_ms"][0].tolist())
    for feature in dataset.card.event_features:
        keys = dataset.vocabulary(feature.column).column("key").to_pylist()
        columns.append([keys[i - 1] for i in rows.lists[feature.column][0]])
    return sorted(zip(*columns, strict=True))


def check_columns(folder: Path, seed: int, num_columns: int) -> None:
    """Prepares one log of random columns in every format, and compares each with the reference implementations."""
    draw = random.Random(seed)
    num_rows = draw.choice([1, 3, 9])
    unit, times = random_times(draw, num_rows)
    names = ["user", "item", "t", *(f"c{i}" for i in range(num_columns - 3))]
    columns = {name: times if name == "t" else random_ids(draw, num_rows) for name in names}
    expected = [[exact_text(value) for value in column] for column in columns.values()]
    expected[names.index("t")] = [exact_ms(exact_text(time), unit) for time in times]
    for name in FORMATS:
        order = draw.sample(names, len(names))
        shuffled = draw.sample(range(num_rows), num_rows)
        source = write_log(draw, folder, name, {n: [columns[n][row] for row in shuffled] for n in order})
        separator = {"log.dat": "::", "log.tsv": "\t"}.get(name, ",")
        log = LogColumns(
            time="t", time_unit=draw.choice(["auto", unit]), categories=tuple(names[3:]), separator=separator
        )
        if name == "table":
            prepare("log", source, folder / "out", log=log, force=True)
        actual = read_dataset(folder / "out") if name == "table" else parse_log(source, log)
        assert actual == sorted(zip(*expected, strict=True)), (seed, name)


def check_many(folder: Path, monkeypatch: pytest.MonkeyPatch, num_logs: int, num_columns: int) -> None:
    monkeypatch.setattr(raw_rows, "ROWS_PER_BATCH", 4)
    monkeypatch.setattr(raw_rows, "BLOCK_BYTES", 1024)
    for seed in range(num_logs):
        check_columns(folder, seed, num_columns)


def test_ids_and_times_are_equal_in_all_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_many(tmp_path, monkeypatch, num_logs=20, num_columns=15)


@pytest.mark.slow
def test_ids_and_times_of_10000_columns_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_many(tmp_path, monkeypatch, num_logs=1000, num_columns=10)
