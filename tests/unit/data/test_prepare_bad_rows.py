"""Bad rows are quarantined with reason and line; duplicates are counted; too many bad rows are an error."""

import csv
import dataclasses
import gzip
import re
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestrec.base.errors import DataError, UserError
from nestrec.data.dataset import Dataset
from nestrec.data.formats.format_registry import prepare
from nestrec.data.formats.log_format import LogOptions
from nestrec.data.prepare import raw_rows
from nestrec.data.prepare.prepare_options import LogColumns

LOG = LogColumns(time="time", rating="rating", actions={"click": "click"})
ALLOW = LogOptions(log=LOG, max_bad_fraction=1.0)
GOOD = "u1,i1,100,4,1\n"


def quarantined(folder: Path) -> list[tuple[int, str]]:
    with (folder / "quarantine.csv").open(newline="") as stream:
        return [(int(row["line"]), row["reason"]) for row in csv.DictReader(stream)]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b",i1,100,4,1", "missing user"),
        (b"u1,,100,4,1", "missing item"),
        (b"u1,i1,,4,1", "missing time"),
        (b"u1,i1,soon,4,1", "time is not a time"),
        (b"u1,i1,-1,4,1", "time out of range"),
        (b"u1,i1,7258118400,4,1", "time out of range"),
        (b"u1,i1,1e300,4,1", "time out of range"),
        (b"u1,i1,4070908800,4,1", "time lies ahead of the clock"),
        (b"u1,i1,100,four,1", "rating is not a number"),
        (b"u1,i1,100,,1", "missing rating"),
        (b"u1,i1,100,inf,1", "rating is not a number"),
        (b"u1,i1,100,1e39,1", "rating is not a number"),
        (b"u1,i1,100,4,yes", "click is not a whole number"),
        (b"u1,i1,100,4", "wrong number of fields"),
        (b"u1,i1,100,4,1,1", "wrong number of fields"),
        (b"u1,\xff\xfe,100,4,1", "not UTF-8"),
        (b"u1,caf\xc3,100,4,1", "not UTF-8"),
        (b"\xff,5", "wrong number of fields"),
    ],
)
def test_bad_row_is_quarantined_with_reason_and_line(tmp_path: Path, row: bytes, reason: str) -> None:
    text = b"user,item,time,rating,click\n" + GOOD.encode() * 3 + b"\n" + row + b"\n" + GOOD.encode() * 2
    (tmp_path / "log.csv").write_bytes(text)
    card = prepare("log", tmp_path / "log.csv", tmp_path / "out", options=ALLOW)
    assert quarantined(tmp_path / "out") == [(6, reason)]
    assert dict(card.counts.quarantined) == {reason: 1}
    assert (card.counts.rows_read, card.counts.events) == (6, 5)
    Dataset.open(tmp_path / "out").verify()


def test_bad_row_line_numbers_are_right_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nestrec.data.prepare.raw_rows.BLOCK_BYTES", 256)
    generator = np.random.default_rng(0)
    kinds = generator.integers(0, 12, 2000)
    rows = {0: "u,i,oops,4,1\n", 1: "u,i,5\n", 2: "\n"}
    lines = [rows.get(int(kind), GOOD) for kind in kinds]
    with gzip.open(tmp_path / "log.csv.gz", "wt") as stream:
        stream.write("user,item,time,rating,click\n" + "".join(lines))
    prepare("log", tmp_path / "log.csv.gz", tmp_path / "out", options=ALLOW)
    reasons = {0: "time is not a time", 1: "wrong number of fields"}
    expected = [(line + 2, reasons[int(kind)]) for line, kind in enumerate(kinds) if kind in reasons]
    assert sorted(quarantined(tmp_path / "out")) == expected


def test_bad_rows_above_one_percent_fail_with_counts_and_option(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item,time,rating,click\n" + GOOD * 98 + "u,i,x,4,1\n,i,5,4,1\n")
    with pytest.raises(DataError, match=r"2 of 100 rows are bad.*time is not a time 1.*line 100") as caught:
        prepare("log", tmp_path / "log.csv", tmp_path / "out", options=LogOptions(log=LOG))
    assert "--log.time_unit" in str(caught.value), "the error suggests a fix of the most frequent problem"
    assert "--max_bad_fraction 1" in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.csv"]


def test_bad_rows_up_to_one_percent_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item,time,rating,click\n" + GOOD * 99 + "u,i,x,4,1\n")
    card = prepare("log", tmp_path / "log.csv", tmp_path / "out", options=LogOptions(log=LOG))
    assert card.counts.events == 99


@pytest.mark.parametrize(("choice", "events"), [("keep", 5), ("drop", 3), ("default", 5)])
def test_duplicates_are_counted_and_kept_or_dropped(tmp_path: Path, choice: str, events: int) -> None:
    rows = ["u,a,5,4,1", "u,a,5,4,0", "v,a,5,4,1", "u,a,5,4,1", "u,a,5,4,1"]
    (tmp_path / "log.csv").write_text("user,item,time,rating,click\n" + "\n".join(rows))
    options = dataclasses.replace(ALLOW, duplicates=choice)
    counts = prepare("log", tmp_path / "log.csv", tmp_path / "out", options=options).counts
    assert counts.duplicates_dropped + counts.duplicates_kept == 2
    assert counts.events == events


def test_duplicates_differ_by_unused_columns(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item,page\nu,a,1\nu,a,2\nu,a,2\n")
    counts = prepare("log", tmp_path / "log.csv", tmp_path / "out", options=LogOptions(duplicates="drop")).counts
    assert (counts.duplicates_dropped, counts.events) == (1, 2)


def test_column_mistyped_gets_a_suggestion(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user_id,item_id\n1,2\n")
    options = LogOptions(log=LogColumns(user="user_di", item="item_id"))
    with pytest.raises(DataError, match="Did you mean 'user_id'"):
        prepare("log", tmp_path / "log.csv", tmp_path / "out", options=options)


def test_format_mistyped_gets_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Did you mean 'movielens'"):
        prepare("movielense", tmp_path, tmp_path / "out")
    with pytest.raises(UserError, match=r"Did you mean 'movielens'.*RecBole's atomic files"):
        prepare("recbole", tmp_path, tmp_path / "out")


def test_prepare_missing_empty_or_corrupt_input_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        prepare("log", tmp_path / "none.csv", tmp_path / "out")
    (tmp_path / "empty.csv").write_text("user,item\n")
    with pytest.raises(DataError, match="no usable events"):
        prepare("log", tmp_path / "empty.csv", tmp_path / "out")
    compressed = gzip.compress(b"user,item\n" + b"".join(b"%d,%d\n" % (i, i * i % 9973) for i in range(50_000)))
    (tmp_path / "cut.csv.gz").write_bytes(compressed[: len(compressed) // 2])
    with pytest.raises(DataError, match="cannot be read"):
        prepare("log", tmp_path / "cut.csv.gz", tmp_path / "out")


CELLS = st.one_of(
    st.sampled_from([b"u", b"7", b"", b"5", b'"', b"\xff", b"1e5", b"-3", b"a b", b"\r"]), st.binary(max_size=4)
)


@given(rows=st.lists(st.lists(CELLS, min_size=1, max_size=4).map(b",".join), max_size=15), has_quotes=st.booleans())
def test_prepare_any_bytes_give_consistent_counts_or_an_error(rows: list[bytes], has_quotes: bool) -> None:
    log = LogColumns(time="time", column_names=("user", "item", "time"), has_quotes=has_quotes)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "log.csv").write_bytes(b"\n".join(rows))
        try:
            options = LogOptions(log=log, max_bad_fraction=1.0)
            counts = prepare("log", Path(name) / "log.csv", Path(name) / "out", options=options).counts
        except DataError:
            assert not (Path(name) / "out").exists()
            return
        assert counts.events + sum(counts.quarantined.values()) == counts.rows_read
        if not has_quotes:
            assert counts.rows_read == sum(1 for line in re.split(rb"\r\n|\r|\n", b"\n".join(rows)) if line)
        assert int(Dataset.open(Path(name) / "out").lengths.sum()) == counts.events


def test_csv_line_endings_and_byte_order_mark_are_read(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_bytes(b"\xef\xbb\xbfuser,item\r\nu,a\r\nu,b\r\n")
    prepare("log", tmp_path / "log.csv", tmp_path / "out")
    assert Dataset.open(tmp_path / "out").items().column("item_key").to_pylist() == ["a", "b"]


@pytest.mark.parametrize(
    ("rows", "first", "last"),
    [
        (b'u1,"i1,4\nu2,i2,5\nu3,"i3,6\n', 2, 4),  # the quoted field ends inside a field of another row
        (b'u1,i1,"4\r\nu2,i2,5\r\n', 2, 4),  # the last field never ends, so each row has the right number of fields
        (b'u1,"i1\n""x""",4\nu2,"i2,5\n', 4, 5),
    ],
)
def test_csv_unclosed_quote_is_an_error_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: bytes, first: int, last: int
) -> None:
    (tmp_path / "log.csv").write_bytes(b"user,item,time\n" + rows)
    for block, end in ((1 << 20, last), (16, "")):  # in one block, and in blocks shorter than the field
        monkeypatch.setattr(raw_rows, "BLOCK_BYTES", block)
        with pytest.raises(DataError, match=f"(?s)quote on line {first} is not closed before line {end}.*has_quo"):
            prepare("log", tmp_path / "log.csv", tmp_path / "out", max_bad_fraction=1.0)
    card = prepare("log", tmp_path / "log.csv", tmp_path / "out", max_bad_fraction=1.0, **{"log.has_quotes": False})
    assert card.counts.rows_read == rows.count(b"\n")


def test_csv_closed_and_plain_quotes_are_read(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_bytes(
        b'"user","item"\nu1,5" pipe\nu2,"a ""b"", c\n\nd"\nu3,"5" pipe\nu4, "x"\nu5,"e\nf"'
    )
    prepare("log", tmp_path / "log.csv", tmp_path / "out")
    keys = Dataset.open(tmp_path / "out").items().column("item_key").to_pylist()
    assert keys == ['5" pipe', 'a "b", c\n\nd', "5 pipe", ' "x"', "e\nf"]


def test_parquet_columns_of_other_types_are_converted(tmp_path: Path) -> None:
    columns = {
        "user": pa.array(["u", "v", "u", None]).dictionary_encode(),
        "item": pa.array([5.0, 6.0, 7.0, 8.0]),
        "time": pa.array([1000, 2000, 500, 0], pa.timestamp("ms")),
        "click": pa.array([True, False, None, True]),
        "page": pa.array(["x", "y", "x", "y"], pa.large_string()),
    }
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    log = LogColumns(time="time", actions={"click": "click"}, categories=("page",))
    card = prepare("log", tmp_path / "log.parquet", tmp_path / "out", options=LogOptions(log=log, max_bad_fraction=1.0))
    assert dict(card.counts.quarantined) == {"missing user": 1}
    dataset = Dataset.open(tmp_path / "out")
    rows = dataset.rows(np.array([0]))
    keys = dataset.items().column("item_key").to_pylist()
    assert [keys[i - 1] for i in rows.lists["item_ids"][0]] == ["7", "5"]
    assert rows.lists["timestamps_ms"][0].tolist() == [500, 1000]
    assert rows.lists["actions"][0].tolist() == [0, 1]
    assert rows.lists["event_page"][0].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("unit", "text", "expected_ms"),
    [
        ("s", "1650000000", 1650000000000),
        ("s", "1650000000.75", 1650000000750),
        ("s", "1.65e9", 1650000000000),
        ("ms", "1650000000123", 1650000000123),
        ("us", "1650000000123456", 1650000000123),
        ("ns", "1650000000123456789", 1650000000123),
        ("iso", "2022-04-15T05:20:00.5+00:00", 1650000000500),
        ("iso", "2022-04-15 05:20:00", 1650000000000),
        ("iso", "2022-04-15 05:20:00.5 UTC", 1650000000500),
    ],
)
def test_times_of_every_unit_become_milliseconds(tmp_path: Path, unit: str, text: str, expected_ms: int) -> None:
    (tmp_path / "log.csv").write_text(f"user,item,t\nu,a,{text}\n")
    options = LogOptions(log=LogColumns(time="t", time_unit=unit))
    prepare("log", tmp_path / "log.csv", tmp_path / "out", options=options)
    rows = Dataset.open(tmp_path / "out").rows(np.array([0]))
    assert rows.lists["timestamps_ms"][0].tolist() == [expected_ms]


@pytest.mark.parametrize(
    ("text", "options", "remedy"),
    [
        ('"1,234.50"', {"log.numbers": ("x",)}, "without thousands separators"),
        ("25.10.2026", {"log.time": "x", "log.time_unit": "iso"}, "dates such as 2026-10-25T12:00:00"),
    ],
)
def test_unreadable_numbers_and_times_suggest_a_format(
    tmp_path: Path, text: str, options: dict[str, object], remedy: str
) -> None:
    (tmp_path / "log.csv").write_text(f"user,item,x\nu,a,{text}\n")
    with pytest.raises(DataError, match=f"(?s)1 of 1 rows are bad.*{remedy}"):
        prepare("log", tmp_path / "log.csv", tmp_path / "out", **options)


def test_fit_fraction_error_for_log_with_one_timestamp(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item,t,x\n" + "u,a,2026-10-25,5\n" * 4)
    options = {"log.time": "t", "log.time_unit": "iso", "log.numbers": ("x",)}
    with pytest.raises(
        DataError, match=r"(?s)fit_fraction=0.8: no event is left to fit transforms on.*--fit_fraction 1"
    ):
        prepare("log", tmp_path / "log.csv", tmp_path / "out", **options)
    card = prepare("log", tmp_path / "log.csv", tmp_path / "out", **options, fit_fraction=1)
    assert card.fit.events == 2


@pytest.mark.parametrize(
    ("format", "options", "option"),
    [
        ("log", {"num_users": 5}, "num_users"),
        ("log", {"random_logs": True}, "random_logs"),
        ("log", {"min_rating": 3.0}, "min_rating"),
        ("movielens", {"log": LogColumns(user="uid")}, "log"),
        ("movielens", {"item_attributes": "a.json"}, "item_attributes"),
        ("criteo", {"min_events_per_user": 5}, "min_events_per_user"),
        ("synthetic", {"max_bad_fraction": 0.5}, "max_bad_fraction"),
    ],
)
def test_prepare_rejects_options_a_format_does_not_use(
    tmp_path: Path, format: str, options: dict[str, object], option: str
) -> None:
    with pytest.raises(UserError) as raised:
        prepare(format, "tiny", tmp_path / "out", **options)
    assert raised.value.option == option
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("column", "values"), [("item", [[1], [2]]), ("time", [True, False])], ids=["a list as an id", "a flag as a time"]
)
def test_parquet_column_with_unsupported_type_is_named(tmp_path: Path, column: str, values: list) -> None:
    columns = {"user": [1, 2], "item": [3, 4], "time": [5, 6], column: values}
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    with pytest.raises(DataError, match="unsupported type") as raised:
        prepare("log", tmp_path / "log.parquet", tmp_path / "out", options=LogOptions(log=LogColumns(time="time")))
    assert raised.value.value == column


def test_columns_with_the_same_name_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item,item\nu,a,b\n")
    pq.write_table(pa.Table.from_arrays([pa.array([1])] * 3, ["user", "item", "item"]), tmp_path / "log.parquet")
    for name in ("log.csv", "log.parquet"):
        with pytest.raises(DataError, match=r"2 columns of .* have this name") as raised:
            prepare("log", tmp_path / name, tmp_path / "out", options=LogOptions())
        assert raised.value.value == "item"


UNSUPPORTED_ENCODINGS = (
    "utf-9",
    "base64",
    "hex",
    "rot13",
    "zlib",
    "bz2",
    "undefined",
    "idna",
    "utf-7",
    "unicode_escape",
    "a\0b",
)


@pytest.mark.parametrize(
    ("field", "value"),
    [("separator", "||"), ("separator", ""), *(("encoding", name) for name in UNSUPPORTED_ENCODINGS)],
)
def test_log_rejects_unknown_encodings_and_separators(field: str, value: str) -> None:
    with pytest.raises(UserError) as raised:
        LogColumns(**{field: value})
    assert raised.value.option == f"log.{field}"


def test_log_wrong_separator_is_suggested_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user;item\nu;a\n")
    with pytest.raises(UserError, match="is the separator right"):
        prepare("log", tmp_path / "log.csv", tmp_path / "out", options=LogOptions())


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "latin-1", "utf-16", "utf-32-be", "cp1252", "gb18030", "shift_jis"]
)
def test_log_encoding_of_text_is_accepted(tmp_path: Path, encoding: str) -> None:
    for separator in (",", "::"):
        text = f"user{separator}item\nu1{separator}i1\n"
        (tmp_path / "log.csv").write_text(text, encoding=encoding)
        log = LogColumns(encoding=encoding, separator=separator)
        card = prepare("log", tmp_path / "log.csv", tmp_path / "out", log=log, force=True)
        assert (card.counts.users, card.counts.quarantined) == (1, {})


def test_log_actions_above_31_are_rejected_before_reading(tmp_path: Path) -> None:
    actions = {f"a{i}": f"event:{i}" for i in range(31)}
    (tmp_path / "log.csv").write_text("user,item,event,rating\n" + "".join(f"u,{i},{i},5\n" for i in range(31)))
    prepare("log", tmp_path / "log.csv", tmp_path / "out", log={"actions": actions})
    last = Dataset.open(tmp_path / "out").rows(np.zeros(1, np.int64)).lists["actions"][0][-1]
    assert last == 2**30
    log = LogColumns(actions=actions, rating="rating")
    for options in (LogOptions(log=log, positive_rating=4), LogOptions(log=LogColumns(actions={**actions, "b": "x"}))):
        with pytest.raises(UserError, match=r"32 actions.*at most 31") as raised:
            prepare("log", tmp_path / "missing.csv", tmp_path / "other", options=options)
        assert raised.value.option == "log.actions"


def test_duplicates_distinguish_empty_text_from_null(tmp_path: Path) -> None:
    columns = {"user": ["u"] * 4, "item": ["a"] * 4, "page": ["", None, "", None]}
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    card = prepare("log", tmp_path / "log.parquet", tmp_path / "out")
    assert card.counts.duplicates_kept == 2
