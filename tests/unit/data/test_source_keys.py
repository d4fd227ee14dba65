"""The id encoder compared with a dictionary."""

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestrec.data.prepare.id_encoder import IdEncoder, as_numbers, is_plain_number

IDS = st.one_of(
    st.integers(-(2**63), 2**63 - 1).map(str),
    st.integers(0, 50).map(str),
    st.sampled_from(["007", "-0", "+1", "1.0", "", " 1", "10" * 9, "1" + "0" * 18, "-9223372036854775808"]),
    st.text(max_size=3),
)


@given(batches=st.lists(st.lists(IDS, max_size=40), max_size=6))
def test_id_encoder_equals_dictionary_in_first_seen_order(batches: list[list[str]]) -> None:
    table = IdEncoder()
    oracle = {}  # type: ignore[var-annotated]
    for ids in batches:
        expected = [oracle.setdefault(i, len(oracle)) for i in ids]
        assert table.encode(pa.array(ids, pa.string())).tolist() == expected
    assert len(table) == len(oracle)
    assert table.all_keys().to_pylist() == list(oracle)
    for ids in batches:
        assert table.find(pa.array(ids, pa.string())).tolist() == [oracle[i] for i in ids]
    assert table.find(pa.array(["never", "123456789"])).tolist() == [
        oracle.get("never", -1),
        oracle.get("123456789", -1),
    ]


def test_id_encoder_treats_numbers_and_their_text_alike() -> None:
    table = IdEncoder()
    assert table.encode(pa.array([5, -3, 2**62], pa.int64())).tolist() == [0, 1, 2]
    assert table.encode(pa.array(["5", "-3", str(2**62), "05"])).tolist() == [0, 1, 2, 3]


def test_id_encoder_keeps_codes_of_a_million_ids() -> None:
    ids = np.random.default_rng(0).permutation(1_000_000) * 1_000_003
    table = IdEncoder()
    for part in np.array_split(ids, 7):
        table.encode(pa.array(part))
    assert np.array_equal(table.find(pa.array(ids)), np.arange(ids.size))
    assert table.keys(np.array([17])).to_pylist() == [str(ids[17])]


@given(text=IDS)
def test_id_encoder_batch_of_one_agrees_with_is_plain_number(text: str) -> None:
    assert (as_numbers(pa.array([text], pa.string())) is not None) == is_plain_number(text)


def test_id_encoder_decimals_equal_integers_and_text() -> None:
    """Regression test: 7.00 got a different id in a batch with fractions than in one without."""
    table = IdEncoder()
    kind = pa.decimal128(38, 10)
    large = 10**20
    integers = table.encode(pa.array([Decimal(7), Decimal(0), Decimal(100)], kind))
    mixed = pa.array([Decimal(7), Decimal("8.50"), Decimal(0), Decimal(100), Decimal(large)], kind)
    codes = table.encode(mixed)
    assert codes.tolist() == [integers[0], 3, integers[1], integers[2], 4]
    assert table.all_keys().to_pylist() == ["7", "0", "100", "8.5", str(large)]
    assert table.find(mixed).tolist() == codes.tolist()
    assert table.find(pa.array(["7", "8.5", str(large)])).tolist() == [0, 3, 4]


def test_ids_hexadecimal_text_is_not_a_number() -> None:
    texts = ["999999999999", "0xE8D4A50FFF"]  # the same number, with the same number of characters
    table = IdEncoder()
    assert table.encode(pa.array(texts)).tolist() == [0, 1]
    assert [table.encode(pa.array([text])).item() for text in texts] == [0, 1]
    assert table.all_keys().to_pylist() == texts


FLOATS = {
    7.0: "7",
    -0.0: "0",
    1e10: "10000000000",
    1.5: "1.5",
    1e-7: "0.0000001",
    2.0**53 + 2: "9007199254740994",
    1e22: "1" + 22 * "0",
}


@pytest.mark.parametrize("neighbors", [[], [0.5], [1e300]], ids=["alone", "fraction", "large"])
@pytest.mark.parametrize(("number", "text"), FLOATS.items())
def test_ids_float_text_ignores_its_neighbors(number: float, text: str, neighbors: list[float]) -> None:
    table = IdEncoder()
    codes = table.encode(pa.array([number, *neighbors]))
    assert table.keys(codes[:1]).to_pylist() == [text]
    assert table.find(pa.array([text])).tolist() == [0]


def test_ids_float32_text_is_the_shortest_of_32_bits() -> None:
    table = IdEncoder()
    table.encode(pa.array([0.1, 16777216.0, 1.5], pa.float32()))
    assert table.all_keys().to_pylist() == ["0.1", "16777216", "1.5"]


def test_ids_timestamps_keep_their_text_in_any_batch() -> None:
    table = IdEncoder()
    moments = pa.array([5, 2 * 10**18], pa.timestamp("ns"))
    assert table.encode(moments[:1]).tolist() == [0]
    assert table.encode(moments).tolist() == [0, 1]
