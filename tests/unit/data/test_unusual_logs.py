"""Logs from practice: sub-millisecond times, unusual types, broken lines, compressed files, partitions and typos."""

import bz2
import gzip
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from nestrec.base.errors import DataError, UserError
from nestrec.cli.data_output import show_card
from nestrec.data.dataset import Dataset
from nestrec.data.dataset_card import DatasetCard
from nestrec.data.formats.format_registry import prepare
from nestrec.data.incremental.append import append
from nestrec.data.prepare import raw_rows
from nestrec.data.prepare.prepare_options import LogColumns
from nestrec.data.streaming.folder_source import FolderSource
from nestrec.data.streaming.ingester import StreamIngester, open_stream_source, stream_log_options
from nestrec.data.streaming.window_policy import WindowRule

MOMENT = 1_704_067_200_123


def write_typed(file: Path, **columns: Any) -> Path:
    """Writes a Parquet log of one event; `columns` are added to the default ones or replace them."""
    pq.write_table(pa.table({"user": ["ann"], "item": [7], "time": [100], **columns}), file)
    return file


@pytest.mark.parametrize(
    ("kind", "count", "expected"),
    [
        (pa.timestamp("us"), MOMENT * 1000 + 456, MOMENT),
        (pa.timestamp("ns", tz="Europe/Berlin"), MOMENT * 10**6 + 456_789, MOMENT),
        (pa.timestamp("s"), MOMENT // 1000, MOMENT // 1000 * 1000),
        (pa.date64(), 86_400_000, 86_400_000),
    ],
    ids=str,
)
def test_times_finer_than_milliseconds_are_truncated(
    tmp_path: Path, kind: pa.DataType, count: int, expected: int
) -> None:
    file = write_typed(tmp_path / "log.parquet", time=pa.array([count]).cast(kind))
    prepare("log", file, tmp_path / "out", **{"log.time": "time"})
    assert Dataset.open(tmp_path / "out").first_ms() == Dataset.open(tmp_path / "out").last_ms() == expected


def test_times_with_fractions_truncated_times_of_day_rejected(tmp_path: Path) -> None:
    file = write_typed(tmp_path / "log.parquet", time=pa.array([MOMENT + 0.75]))
    prepare("log", file, tmp_path / "out", log={"time": "time", "time_unit": "ms"})
    assert Dataset.open(tmp_path / "out").last_ms() == MOMENT
    write_typed(file, time=pa.array([5]).cast(pa.time64("us")))
    with pytest.raises(DataError, match=r"column=time: unsupported type time64.*or of times"):
        prepare("log", file, tmp_path / "other", log={"time": "time"})


def test_csv_quoted_fields_may_span_lines_and_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_rows, "BLOCK_BYTES", 256)
    rows = "".join(f'ann,{i},{i},"first\nsecond, {"x" * i}\n\n""third"""\n' for i in range(40))
    (tmp_path / "log.csv").write_text("user,item,time,title\n" + rows)
    card = prepare("log", tmp_path / "log.csv", tmp_path / "out", log={"time": "time"})
    assert (card.counts.events, card.counts.items, card.counts.quarantined) == (40, 40, {})


def test_parquet_unused_columns_may_have_any_type(tmp_path: Path) -> None:
    odd = {
        "bytes": pa.array([b"\xff"]),
        "digest": pa.array([b"\xff" * 16], pa.binary(16)),
        "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
        "blobs": pa.array([[b"\xff"]]),
        "record": pa.array([{"a": [1], "b": None}]),
    }
    file = write_typed(tmp_path / "log.parquet", **odd)
    assert prepare("log", file, tmp_path / "out").counts.events == 1
    for name, column in odd.items():
        table = write_typed(tmp_path / "items.parquet", **{name: column})
        for options in ({"log": {"lists": (name,)}}, {"items": str(table)}):
            with pytest.raises(DataError, match=rf"column={name}: unsupported type .*ignored_columns"):
                prepare("log", file, tmp_path / "other", **options)


def test_ids_uuid_columns_keep_their_text(tmp_path: Path) -> None:
    key = uuid.UUID(int=2**127)
    file = write_typed(tmp_path / "log.parquet", user=pa.array([key.bytes], pa.uuid()))
    prepare("log", file, tmp_path / "out")
    assert Dataset.open(tmp_path / "out").user_keys(np.zeros(1, np.int64)) == [str(key)]


@pytest.mark.parametrize(
    ("name", "pack", "remedy"),
    [
        ("log.csv", gzip.compress, ".gz"),
        ("log.csv.bz2", bz2.compress, "unpack"),
        ("log.csv", lambda text: b"PAR1" + text, ".parquet"),
        ("log.csv", lambda text: text.decode().encode("utf-16"), "--log.encoding utf-16"),
    ],
    ids=["gzip", "bzip2", "parquet", "utf-16"],
)
def test_log_file_with_misleading_suffix_is_rejected(
    tmp_path: Path, name: str, pack: Callable[[bytes], bytes], remedy: str
) -> None:
    (tmp_path / name).write_bytes(pack(b"user,item\nann,7\n"))
    with pytest.raises(DataError, match=rf"(?is)input=.*{name}: the file is .*{remedy}"):
        prepare("log", tmp_path / name, tmp_path / "out")


def test_log_partitions_are_read_and_named_by_folder(tmp_path: Path) -> None:
    for day in ("1", "2"):
        (tmp_path / "log" / f"day={day}").mkdir(parents=True)
        write_typed(tmp_path / "log" / f"day={day}" / "part-0.parquet", user=[f"user {day}"])
    (tmp_path / "log" / "_SUCCESS").touch()
    card = prepare("log", tmp_path / "log", tmp_path / "out")
    assert (card.counts.users, sorted(card.inputs)) == (2, ["day=1/part-0.parquet", "day=2/part-0.parquet"])
    for day in ("1", "2"):  # files of equal names in different partitions are tracked separately
        with pytest.raises(DataError, match="already contains this file"):
            append(tmp_path / "log" / f"day={day}", tmp_path / "out")


def test_log_files_in_subfolders_are_mentioned_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "log" / "2024").mkdir(parents=True)
    write_typed(tmp_path / "log" / "2024" / "log.parquet")
    with pytest.raises(DataError, match=r"no log files found.*subfolders.*\*\*/\*\.parquet"):
        prepare("log", tmp_path / "log", tmp_path / "out")


def test_log_action_value_without_rows_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item,event\nann,7,click\nann,9,buy\n")
    with pytest.raises(DataError, match=r"log.actions=order=event:bui: no row has the value 'bui'.*Did you mean 'buy'"):
        prepare("log", tmp_path / "log.csv", tmp_path / "out", log={"actions": {"order": "event:bui"}})
    assert not (tmp_path / "out").exists()


def test_ids_json_3_and_3_0_are_equal_and_lists_bad(tmp_path: Path) -> None:
    events = [{"user": "ann", "item": item} for item in (3, 3.0, "3", [3, 4])]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    card = prepare("log", tmp_path / "log.jsonl", tmp_path / "out", max_bad_fraction=1)
    assert (card.counts.items, card.counts.events) == (1, 3)
    assert card.counts.quarantined == {"item is a list": 1}


def test_prepare_options_accept_dotted_names_and_dicts(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("uid,iid,stars\nann,7,1\nann,9,5\n")
    dotted = {"log.user": "uid", "log.item": "iid", "log.rating": "stars", "min_rating": np.float64(2)}
    for name, options in {"a": dotted, "b": {"log": {"user": "uid"}, "log.item": "iid"}}.items():
        card = prepare("log", tmp_path / "log.csv", tmp_path / name, **options)
        assert card.counts.events == (1 if name == "a" else 2)
    with pytest.raises(UserError, match=r"log.usr=uid.*Did you mean --log.user"):
        prepare("log", tmp_path / "log.csv", tmp_path / "c", **{"log.usr": "uid"})


def test_times_that_look_like_seconds_as_milliseconds_warn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_typed(tmp_path / "log.parquet", time=[MOMENT // 1000])
    for unit, first, is_early in (("s", "2024-01-01T00:00:00+00:00", False), ("ms", "1970-01-20T17:21:07.2", True)):
        card = prepare("log", file, tmp_path / unit, log={"time": "time", "time_unit": unit})
        show_card(card, tmp_path / unit)
        printed = capsys.readouterr().out
        assert f"times: {first}" in printed
        assert ("WARNING" in printed and "--log.time_unit" in printed) == is_early


LONE_SURROGATES = [r'{"user": "u\ud800", "item": 1}', r'{"user": "u", "item": 1, "\udfff": {"a": 2}}']


@pytest.mark.parametrize("line", LONE_SURROGATES)
def test_json_lone_surrogate_is_a_bad_row(tmp_path: Path, line: str) -> None:
    good = r'{"user": "\ud83d\ude00", "item": 1}'
    (tmp_path / "log.jsonl").write_text(f"{good}\n{line}\n{good}\n")
    card = prepare("log", tmp_path / "log.jsonl", tmp_path / "out", max_bad_fraction=1)
    assert (card.counts.events, card.counts.rows_read) == (2, 3)
    assert card.counts.quarantined == {"not Unicode: half of a surrogate pair": 1}
    assert Dataset.open(tmp_path / "out").user_keys(np.zeros(1, np.int64)) == ["\U0001f600"]


def test_stream_continues_after_a_lone_surrogate(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("\n".join([*LONE_SURROGATES, '{"user": "u", "item": 1}']))
    rows = FolderSource(tmp_path, LogColumns(), ("user", "item")).read({}, 10)
    assert rows is not None
    assert (rows.batch.num_rows, len(rows.batch.bad)) == (1, 2)


@pytest.mark.parametrize("separator", ["::", ",", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le"])
def test_byte_order_mark_is_not_part_of_the_first_id(tmp_path: Path, separator: str, encoding: str) -> None:
    (tmp_path / "log.dat").write_text(f"\ufeffu{separator}7\nu{separator}8\n", encoding=encoding)
    log = LogColumns(separator=separator, column_names=("user", "item"), encoding=encoding)
    assert prepare("log", tmp_path / "log.dat", tmp_path / "out", log=log).counts.users == 1


ROWS = [("ann", 7, 100, None), ("ann", 7, 100, "x"), ("bob", 8, 200, "y,z")]


def write_rows(file: Path, names: list[str]) -> None:
    """Writes the rows in the format of the file's suffix, with the columns in this order."""
    columns = dict(zip(("user", "item", "time", "note"), zip(*ROWS, strict=True), strict=True))
    table = pa.table({name: pa.array(columns[name]) for name in names})
    if file.suffix == ".parquet":
        pq.write_table(table, file)
    elif file.suffix == ".jsonl":
        objects = [{name: value for name, value in row.items() if value is not None} for row in table.to_pylist()]
        file.write_text("".join(json.dumps(row) + "\n" for row in objects))
    else:
        pyarrow.csv.write_csv(table, file)


@pytest.mark.parametrize("second", ["2.csv", "2.jsonl", "2.parquet"])
@pytest.mark.parametrize("first", ["1.csv", "1.jsonl", "1.parquet"])
def test_duplicates_are_found_across_formats_and_orders(tmp_path: Path, first: str, second: str) -> None:
    (tmp_path / "log").mkdir()
    write_rows(tmp_path / "log" / first, ["user", "item", "time", "note"])
    write_rows(tmp_path / "log" / second, ["note", "time", "item", "user"])
    card = prepare("log", tmp_path / "log", tmp_path / "out", duplicates="drop", **{"log.time": "time"})
    assert (card.counts.duplicates_dropped, card.counts.events) == (3, 3)


def test_duplicates_differ_by_column_null_and_list(tmp_path: Path) -> None:
    columns = {
        "user": ["u"] * 4,
        "item": [1] * 4,
        "a": ["x", None, "", None],
        "b": [None, "x", None, None],
    }
    pq.write_table(pa.table(columns), tmp_path / "1.parquet")
    lists = {"user": ["u"] * 2, "item": [1] * 2, "a": [["x", "y"], ["x,y"]]}
    pq.write_table(pa.table(lists), tmp_path / "2.parquet")
    for name in ("1", "2"):
        card = prepare("log", tmp_path / f"{name}.parquet", tmp_path / f"out-{name}")
        assert (card.counts.duplicates_kept, card.counts.quarantined) == (0, {})


@pytest.mark.parametrize("name", ["log.csv", "log.tsv", "log.dat", "log.jsonl"])
def test_rows_without_any_value_are_counted(tmp_path: Path, name: str) -> None:
    separator = {".csv": ",", ".tsv": "\t", ".dat": "::"}.get(Path(name).suffix, "")
    rows = ["user", "item", "note"], ["u", "1", ""], ["", "", ""], ["v", "2", ""], ["", "", ""]
    lines = [separator.join(row) for row in rows] if separator else [json.dumps({"user": "u", "item": 1}), "{}", "{}"]
    (tmp_path / name).write_text("\n\n".join(lines) + "\n\n\n")
    log = LogColumns(separator=separator or ",")
    if separator == ",":
        (tmp_path / name).write_bytes(b"\r\n\r\n".join([*map(str.encode, lines), b'"",,', b'"a\n\nb",3,\r\n\r\n,,']))
    card = prepare("log", tmp_path / name, tmp_path / "out", log=log, max_bad_fraction=1)
    assert card.counts.quarantined == {"missing user": 4 if separator == "," else 2}
    assert card.counts.rows_read == card.counts.events + sum(card.counts.quarantined.values())
    if separator:
        assert "5,missing user" in (tmp_path / "out" / "quarantine.csv").read_text()


NO_TIMES = [pa.array([1], pa.duration("ms")), pa.array([1], pa.time32("s")), pa.array([True])]


@pytest.mark.parametrize("cells", NO_TIMES, ids=["duration", "time of day", "boolean"])
@pytest.mark.parametrize("column", ["time", "position"])
def test_times_of_duration_type_are_rejected(tmp_path: Path, column: str, cells: pa.Array) -> None:
    file = write_typed(tmp_path / "log.parquet", time=cells)
    with pytest.raises(DataError, match=r"column=time: unsupported type (duration|time|bool)"):
        prepare("log", file, tmp_path / "out", log={column: "time"})


def folder_with_others(folder: Path) -> Path:
    """Makes a folder with one log file and several entries that are skipped."""
    (folder / "2024").mkdir(parents=True)
    (folder / "log.csv").write_text("user,item\nann,7\n")
    for name in ("a.csv.zst", "B.CSV", "c.csv.bz2", "_SUCCESS", ".part.crc", "2024/more.csv"):
        (folder / name).write_text("user,item\nbob,8\n")
    (folder / "gone.csv").symlink_to(folder / "nowhere.csv")
    return folder


def test_skipped_files_of_a_folder_are_listed(tmp_path: Path) -> None:
    folder = folder_with_others(tmp_path / "log")
    listed = "2024/, B.CSV, a.csv.zst, c.csv.bz2, gone.csv (a broken symbolic link); supported file names end in .csv,"
    card = prepare("log", folder, tmp_path / "out")
    assert [listed in note for note in card.notes] == [True]
    table = prepare("log", folder / "log.csv", tmp_path / "table", items=str(folder), item_columns={"key": "item"})
    assert [listed in note for note in table.notes] == [True]
    linked = prepare("log", f"{folder}/*.csv", tmp_path / "pattern")
    assert ["gone.csv (a broken" in note and "a.csv" not in note for note in linked.notes] == [True]
    (folder / "log.csv").write_text("user,item\nann,9\n")
    assert [listed in note for note in append(folder, tmp_path / "pattern").notes] == [False, True]


def test_skipped_files_of_a_stream_are_reported_once(tmp_path: Path) -> None:
    folder = folder_with_others(tmp_path / "incoming")
    prepare("log", folder / "log.csv", tmp_path / "out")
    options = stream_log_options(DatasetCard.load(tmp_path / "out"), None, 1.0)
    source = open_stream_source(str(folder), options)
    reports: list[str] = []
    stream = StreamIngester(source, str(folder), tmp_path / "out", WindowRule(events=1), options, report=reports.append)
    assert stream.next_window(lambda: True) is not None
    assert stream.next_window(lambda: True) is None
    assert sorted(text.partition(" is skipped")[0].partition(" (")[0] for text in reports) == [
        "2024/", "B.CSV", "a.csv.zst", "c.csv.bz2", "gone.csv",
    ]  # fmt: skip
