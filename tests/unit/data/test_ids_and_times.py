"""The same id gives the same text and the same time the same milliseconds, whatever holds it."""

import itertools
from decimal import ROUND_FLOOR, Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from nestrec.base.errors import DataError, UserError
from nestrec.cli.app import app
from nestrec.data.card import Card
from nestrec.data.dataset import Dataset
from nestrec.data.growth.append import append
from nestrec.data.prepare.options import LogColumns
from nestrec.data.prepare.parse import BAD, GOOD, UNIT_NAMES, parse_integers, parse_times_ms
from nestrec.data.prepare.preparation import prepare
from nestrec.data.sources.closing import WindowRule
from nestrec.data.sources.stream import Stream, open_stream_source, options_of

UNITS = {"s": 3, "ms": 0, "us": -3, "ns": -6}
MOMENT_NS = 1_700_000_000_123_456_789


def exact_ms(number: str | Decimal, unit: str) -> int:
    """Rounds the decimal number itself down: the definition."""
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
def test_times_of_floats_are_those_of_their_texts(numbers: list[float], unit: str) -> None:
    found = parse_times_ms(pa.array(numbers), unit)[0]
    assert found.tolist() == [exact_ms(repr(number), unit) for number in numbers]
    assert found.tolist() == parse_times_ms(pa.array(map(repr, numbers)), unit)[0].tolist()


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
def test_times_and_integers_are_decimal_digits_alone(text: str) -> None:
    for cells in ([text], ["16", text], [text, "16"]):
        row = cells.index(text)
        assert parse_times_ms(pa.array(cells), "s")[1][row] == BAD
        assert parse_integers(pa.array(cells))[1][row] == BAD


def test_integers_are_read_alike_with_any_neighbors() -> None:
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
    assert f"unit of times: {unit} (" in shown.output
    assert Card.load(out).options["log"]["time_unit"] == unit
    assert set(times_of(out)) <= {MOMENT_MS, 0}


def test_time_unit_without_plausible_years_is_seconds(tmp_path: Path) -> None:
    card = prepare("log", write_csv(tmp_path / "log.csv", "5", "7.5"), tmp_path / "out", **{"log.time": "t"})
    assert (card.options["log"]["time_unit"], times_of(tmp_path / "out")) == ("s", [5000, 7500])


def test_time_unit_that_is_ambiguous_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    for first, second in itertools.permutations(IN_UNIT, 2):
        both = write_csv(tmp_path / "both.csv", IN_UNIT[first], IN_UNIT[second])
        write_csv(tmp_path / "log" / "1.csv", IN_UNIT[first])
        write_csv(tmp_path / "log" / "2.csv", IN_UNIT[second])
        for source in (both, tmp_path / "log"):
            with pytest.raises(DataError, match=r"looks like .* and .* like .*\n.*--log.time_unit"):
                prepare("log", source, tmp_path / "out", **{"log.time": "t"})


@pytest.mark.parametrize("unit", ["ms", "us", "ns", "iso"])
def test_time_unit_that_is_wrong_is_named_in_the_error(tmp_path: Path, unit: str) -> None:
    source = write_csv(tmp_path / "log.csv", IN_UNIT[unit], IN_UNIT[unit])
    with pytest.raises(DataError) as refused:
        prepare("log", source, tmp_path / "out", **{"log.time": "t", "log.time_unit": "s"})
    assert f"{IN_UNIT[unit]} looks like {UNIT_NAMES[unit]}. Set --log.time_unit {unit}" in refused.value.remedy


def test_time_unit_of_timestamps_needs_no_inference(tmp_path: Path) -> None:
    moments = pa.array([MOMENT_MS, 5], pa.timestamp("ms"))
    pq.write_table(pa.table({"user": ["u", "u"], "item": [1, 2], "t": moments}), tmp_path / "log.parquet")
    card = prepare("log", tmp_path / "log.parquet", tmp_path / "out", **{"log.time": "t"})
    assert card.options["log"]["time_unit"] == "iso"
    append(write_csv(tmp_path / "more.csv", IN_UNIT["iso"]), tmp_path / "out")
    assert times_of(tmp_path / "out") == [5, MOMENT_MS, MOMENT_MS]


def test_time_unit_of_later_events_is_that_of_the_dataset(tmp_path: Path) -> None:
    """The times of the new files alone would be taken for seconds."""
    folder = tmp_path / "out"
    prepare("log", write_csv(tmp_path / "log.csv", "1700000000123"), folder, **{"log.time": "t"})
    append(write_csv(tmp_path / "more.csv", "1700000000"), folder)
    (tmp_path / "incoming").mkdir()
    write_csv(tmp_path / "incoming" / "1.csv", "1700000001")
    for log in (None, LogColumns(time="t")):
        options = options_of(Card.load(folder), log, 1.0)
        assert options.log.time_unit == "ms"
    source = open_stream_source(str(tmp_path / "incoming"), options)
    Stream(source, str(tmp_path / "incoming"), folder, WindowRule(events=1), options).next_window(lambda: True)
    assert times_of(folder) == [1700000000, 1700000001, MOMENT_MS]


def test_time_unit_of_a_stream_without_one_is_asked_for(tmp_path: Path) -> None:
    card = prepare("synthetic", "tiny", tmp_path / "out", num_users=4)
    with pytest.raises(UserError, match=r"--log.time_unit s, ms, us, ns or iso"):
        options_of(card, LogColumns(time="t"), 1.0)
    assert options_of(card, LogColumns(), 1.0).log.time is None
