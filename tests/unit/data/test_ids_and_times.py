"""The same id gives the same text and the same time the same milliseconds, whatever holds it."""

from decimal import ROUND_FLOOR, Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestrec.data.prepare.parse import BAD, GOOD, parse_integers, parse_times_ms

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
