"""Preparing any log, in any order of rows, equals a reference implementation in plain Python."""

import csv
import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestrec.base.errors import DataError
from nestrec.data.dataset import Dataset
from nestrec.data.formats.format_registry import prepare
from nestrec.data.formats.log_format import LogOptions
from nestrec.data.prepare import raw_rows
from nestrec.data.prepare.prepare_options import LogColumns
from support.prepare_oracle import ExpectedDataset, LogEvent, expected_dataset

OPTIONS = LogOptions(log=LogColumns(time="time", time_unit="ms", rating="rating"))
PRINTABLE = st.characters(blacklist_categories=("Cs", "Cc", "Zl", "Zp"))
IDS = st.one_of(
    st.integers(-5, 12).map(str),
    st.sampled_from(["007", "7", "-0", "+7", "7.0", "a,b", 'say "x"', " 7", "9" * 18, "9" * 19, "-" + "9" * 19, "é"]),
    st.text(PRINTABLE, min_size=1, max_size=4),
)
SMALL_IDS = st.integers(0, 5).map(str)
EVENTS = st.builds(LogEvent, SMALL_IDS, SMALL_IDS, st.integers(0, 6), st.sampled_from([1.0, 2.5, 5.0])) | st.builds(
    LogEvent, IDS, IDS, st.integers(0, 6), st.sampled_from([1.0, 2.5, 5.0])
)
LOGS = st.lists(EVENTS, min_size=1, max_size=60)
FILTERS = st.fixed_dictionaries(
    {
        "drops_duplicates": st.booleans(),
        "min_rating": st.sampled_from([0.0, 2.5]),
        "min_events_per_user": st.integers(0, 3),
        "min_events_per_item": st.integers(0, 3),
        "is_iterated": st.booleans(),
        "final_min_events_per_user": st.integers(0, 3),
    }
)


def write_csv(path: Path, log: list[LogEvent]) -> None:
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([LogEvent._fields, *log])


def assert_equal(dataset: Dataset, expected: ExpectedDataset) -> None:
    rows = dataset.rows(np.arange(dataset.num_samples))
    keys = ["", *dataset.items().column("item_key").to_pylist()]
    assert keys[1:] == expected.items
    assert dataset.user_keys(rows.indices) == [user for user, _ in expected.users]
    assert rows.scalars["user_id"].tolist() == list(range(dataset.num_samples))
    flat = [event for _, events in expected.users for event in events]
    item_ids, offsets = rows.lists["item_ids"]
    assert np.diff(offsets).tolist() == [len(events) for _, events in expected.users] == dataset.lengths.tolist()
    assert [keys[i] for i in item_ids] == [event.item for event in flat]
    assert rows.lists["timestamps_ms"][0].tolist() == [event.time for event in flat]
    assert rows.lists["event_rating"][0].tolist() == [event.rating for event in flat]


def as_options(filters: dict[str, object]) -> LogOptions:
    plain = dict(filters)
    duplicates = "drop" if plain.pop("drops_duplicates") else "keep"
    passes = "iterated" if plain.pop("is_iterated") else "single"
    return dataclasses.replace(OPTIONS, duplicates=duplicates, core_filter=passes, **plain)


@given(log=LOGS, filters=FILTERS, memory_bytes=st.sampled_from([1, 400, 1 << 20]))
def test_prepare_equals_reference_implementation(
    log: list[LogEvent], filters: dict[str, object], memory_bytes: int
) -> None:
    expected = expected_dataset(log, **filters)  # type: ignore[arg-type]
    options = dataclasses.replace(as_options(filters), sort_memory_bytes=memory_bytes)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_csv(folder / "log.csv", log)
        if not expected.users:
            with pytest.raises(DataError):
                prepare("log", folder / "log.csv", folder / "out", options=options)
            return
        card = prepare("log", folder / "log.csv", folder / "out", options=options)
        assert_equal(Dataset.open(folder / "out"), expected)
    num_duplicates = card.counts.duplicates_dropped + card.counts.duplicates_kept
    assert num_duplicates == expected.num_duplicates
    assert card.counts.rows_read == len(log)
    assert sum(card.counts.filtered.values()) + card.counts.duplicates_dropped + card.counts.events == len(log)


@given(log=LOGS)
def test_parquet_and_csv_give_the_same_dataset(log: list[LogEvent]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        columns = dict(zip(LogEvent._fields, zip(*log, strict=True), strict=True))
        pq.write_table(pa.table({n: pa.array(list(c)) for n, c in columns.items()}), folder / "log.parquet")
        prepare("log", folder / "log.parquet", folder / "out", options=OPTIONS)
        assert_equal(Dataset.open(folder / "out"), expected_dataset(log))


def test_prepare_files_do_not_depend_on_memory_or_block_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(5)
    log = [LogEvent(str(u), f"i{i}", int(t), 3.0) for u, i, t in generator.integers(0, 300, (5000, 3))]
    write_csv(tmp_path / "log.csv", log)
    cards = []
    for block_bytes, memory_bytes in ((8 << 20, 256 << 20), (4096, 10_000), (70_000, 1_000_000)):
        monkeypatch.setattr(raw_rows, "BLOCK_BYTES", block_bytes)
        options = dataclasses.replace(OPTIONS, sort_memory_bytes=memory_bytes, force=True)
        cards.append(prepare("log", tmp_path / "log.csv", tmp_path / "out", options=options))
    assert cards[0].files == cards[1].files == cards[2].files
    assert_equal(Dataset.open(tmp_path / "out"), expected_dataset(log))


@pytest.mark.parametrize(("passes", "events"), [("iterated", 4), ("single", 6)])
def test_core_filter_iterated_continues_until_stable(tmp_path: Path, passes: str, events: int) -> None:
    """Removing item c, which has too few events, leaves too few for user w, then for item d, and then for user x."""
    pairs = ["u,a", "u,b", "v,a", "v,b", "w,c", "w,d", "x,d"]
    (tmp_path / "log.csv").write_text("user,item\n" + "\n".join(pairs) + "\nx,e\n")
    options = LogOptions(min_events_per_user=2, min_events_per_item=2, core_filter=passes)
    card = prepare("log", tmp_path / "log.csv", tmp_path / "out", options=options)
    assert card.counts.events == events


def test_position_column_breaks_ties_of_time(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item,time,pos\nu,a,5,2\nu,b,5,1\nu,c,4,9\nu,d,5,1\n")
    log = LogColumns(time="time", position="pos")
    prepare("log", tmp_path / "log.csv", tmp_path / "out", options=LogOptions(log=log))
    dataset = Dataset.open(tmp_path / "out")
    keys = dataset.items().column("item_key").to_pylist()
    assert [keys[i - 1] for i in dataset.rows(np.array([0])).lists["item_ids"][0]] == ["c", "b", "d", "a"]


def test_log_without_times_keeps_file_order(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item\nu,b\nv,a\nu,a\nu,c\n")
    card = prepare("log", tmp_path / "log.csv", tmp_path / "out")
    dataset = Dataset.open(tmp_path / "out")
    assert dataset.rows(np.array([0])).lists["item_ids"][0].tolist() == [1, 2, 3]
    assert not card.has_timestamps
    assert "timestamps_ms" not in dataset.columns
    assert "actions" not in dataset.columns
