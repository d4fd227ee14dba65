"""A dataset after `append(A, B)` equals `prepare(A + B)`, its reference implementation."""

import csv
import dataclasses
import gzip
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from nestrec.base.errors import DataError, UserError
from nestrec.cli.app import app
from nestrec.data.dataset import Dataset
from nestrec.data.dataset_card import DatasetCard
from nestrec.data.formats.format_registry import prepare
from nestrec.data.formats.format_spec import TableColumns
from nestrec.data.incremental.append import append
from nestrec.data.incremental.compaction import compact
from nestrec.data.incremental.generations import restore
from nestrec.data.prepare.prepare_options import LogColumns
from nestrec.data.streaming.ingester import StreamIngester, open_stream_source, stream_log_options
from nestrec.data.streaming.window_policy import WindowRule
from support.fail_points import armed

NAMES = ("user", "item", "time", "click", "tab", "tags", "price", "note", "brand", "level", "weight")
Row = tuple[Any, ...]


def options(duplicates: str) -> dict[str, Any]:
    log = LogColumns(
        time="time",
        time_unit="ms",
        actions={"click": "click"},
        categories=("tab",),
        lists=("tags",),
        list_separator="|",
        numbers=("price",),
        transforms={"price": "standard"},
        texts=("note",),
    )
    return {
        "log": log,
        "duplicates": duplicates,
        "item_columns": TableColumns(categories=("brand",)),
        "user_columns": TableColumns(categories=("level",)),
        "max_bad_fraction": 1.0,
    }


@st.composite
def logs(draw: st.DrawFn, *, max_rows: int = 14) -> list[Row]:
    """Draws rows of few users, items and times, so that ties, late events and duplicates are common."""
    rows = []
    for _ in range(draw(st.integers(1, max_rows))):
        user, item = draw(st.integers(0, 4)), draw(st.sampled_from(["a", "b", "7", "007", "c", "12", "d"]))
        time = draw(st.one_of(st.integers(1000, 1012), st.just("soon")))
        tab, tags = draw(st.sampled_from(["", "x", "y", "z"])), draw(st.sampled_from(["", "p", "p|q", "r|p|s"]))
        price, note = draw(st.sampled_from(["", "1.5", "2"])), draw(st.sampled_from(["", "red hat", "hat"]))
        # Attributes are a function of the item or user, because only the first row of each is used.
        attributes = (f"brand{ord(item[0]) % 3}", f"level{user % 2}", "1")
        rows.append((user, item, time, draw(st.integers(0, 1)), tab, tags, price, note, *attributes))
    return rows


def write(path: Path, rows: list[Row]) -> Path:
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(NAMES)
        writer.writerows(rows)
    return path


def content(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the sequences of users and the items of a dataset, with ids replaced by the keys of the source."""
    dataset = Dataset.open(folder)
    dataset.verify()
    card = dataset.card
    items = dataset.items().to_pydict()
    keys = {f.column: key_of(dataset, f.column) for f in card.features if f.kind in ("category", "categories")}
    item_key = [None, *items["item_key"]]
    rows = dataset.rows(np.arange(dataset.num_samples))
    assert dataset.lengths.tolist() == rows.scalars["length"].tolist()
    assert rows.scalars["user_id"].tolist() == list(range(dataset.num_samples))
    users = {}
    for row, name in enumerate(dataset.user_keys(np.arange(dataset.num_samples))):
        sequence: dict[str, Any] = {}
        for column, (values, offsets) in rows.lists.items():
            own_values = values[offsets[row] : offsets[row + 1]].tolist()
            names = {"item_ids": item_key}.get(column, keys.get(column))
            sequence[column] = [str(v) if names is None else names[v] for v in own_values]
        sequence["level"] = keys["user_level"][rows.scalars["user_level"][row]]
        users[name] = sequence
    item_features = {
        key: (count, keys["item_brand"][brand])
        for key, count, brand in zip(items["item_key"], items["count"], items["item_brand"], strict=True)
    }
    assert items["item_id"] == list(range(1, len(items["item_id"]) + 1))
    for feature in card.features:
        if feature.kind in ("category", "categories"):
            assert feature.vocabulary_size == len(keys[feature.column])
    return users, item_features


def key_of(dataset: Dataset, column: str) -> list[str | None]:
    if not dataset.has_vocabulary(column):
        return [None]
    table = dataset.vocabulary(column).to_pydict()
    assert table["id"] == list(range(1, len(table["id"]) + 1))
    return [None, *table["key"]]


def figures(card: DatasetCard) -> tuple[Any, ...]:
    """Returns the statistics of a card, without `duplicates_kept`: append counts only the duplicates that it drops."""
    counts = dataclasses.replace(card.counts, duplicates_kept=0)
    return counts, card.lengths, card.popularity, card.length_histogram, card.popularity_histogram


def is_good(rows: list[Row]) -> bool:
    return any(row[2] != "soon" for row in rows)


@pytest.mark.parametrize("examples", [4, pytest.param(400, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_append_equals_prepare_of_all_rows(tmp_path: Path, examples: int) -> None:
    parts = st.lists(logs(max_rows=8), min_size=1, max_size=4)

    @settings(max_examples=examples, deadline=None)
    @given(logs(), parts, st.sampled_from(["keep", "drop"]), st.booleans())
    def check(first: list[Row], more: list[list[Row]], duplicates: str, compacts: bool) -> None:
        check_equal(tmp_path, first, more, duplicates, compacts=compacts)

    check()


def check_equal(tmp_path: Path, first: list[Row], more: list[list[Row]], duplicates: str, *, compacts: bool) -> None:
    more = [rows for rows in more if is_good(rows)]
    if not more:
        return
    # These rows make sure that there are values to fit the transform of the number on.
    first = [*((8, "z", 900 + n, 1, "x", "", str(n), "", "b", "l", 1) for n in range(4)), *first]
    for name in ("grown", "prepared"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
    prepare("log", write(tmp_path / "0.csv", first), tmp_path / "grown", **options(duplicates))
    fitted = DatasetCard.load(tmp_path / "grown")
    more = [[*rows, (9, f"new{n}", 1001 + n, 0, "", "", "", "", "b", "l", 1)] for n, rows in enumerate(more)]
    for number, rows in enumerate(more, start=1):
        append(write(tmp_path / f"{number}.csv", rows), tmp_path / "grown")
    if compacts:
        compact(tmp_path / "grown")
    everything = [*first, *(row for rows in more for row in rows)]
    prepare("log", write(tmp_path / "all.csv", everything), tmp_path / "prepared", **options(duplicates))
    grown, expected = DatasetCard.load(tmp_path / "grown"), DatasetCard.load(tmp_path / "prepared")
    assert content(tmp_path / "grown") == content(tmp_path / "prepared")
    assert figures(grown) == figures(expected)
    assert grown.event_features[0].transform == fitted.event_features[0].transform
    assert grown.generation == len(more) + int(compacts)
    for number, generation in enumerate(grown.generations):
        assert generation.digest == DatasetCard.load(tmp_path / "grown", number).digest_of_files


@pytest.fixture
def grown(tmp_path: Path) -> Path:
    prepare("log", write(tmp_path / "0.csv", rows_of(0)), tmp_path / "data", **options("keep"))
    return tmp_path / "data"


def rows_of(number: int) -> list[Row]:
    return [(u, f"i{number + u}", 1000 + 10 * number + u, 1, "x", "p", "1", "hat", "b0", "l0", 1) for u in range(3)]


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


POINTS = ("data.append.after_split", "data.append.before_layer", "data.append.before_card")


@pytest.mark.parametrize("point", POINTS)
def test_append_interrupted_keeps_previous_generation(grown: Path, point: str) -> None:
    class SimulatedKill(BaseException):
        pass

    def kill() -> None:
        raise SimulatedKill

    append(write(grown.parent / "1.csv", rows_of(1)), grown)
    before = content(grown)
    second = write(grown.parent / "2.csv", rows_of(2))
    with armed(point, kill), pytest.raises(SimulatedKill):
        append(second, grown)
    assert content(grown) == before
    assert DatasetCard.load(grown).generation == 1
    append(second, grown)
    untouched = grown.parent / "untouched"
    prepare("log", grown.parent / "0.csv", untouched, **options("keep"))
    for name in ("1.csv", "2.csv"):
        append(grown.parent / name, untouched)
    assert files_in(grown) == files_in(untouched)


def test_append_rejects_a_file_already_in_the_dataset(grown: Path) -> None:
    first = write(grown.parent / "1.csv", rows_of(1))
    append(first, grown)
    again = shutil.copy(first, grown.parent / "other name.csv")
    other_ends = grown.parent / "cr.csv"
    other_ends.write_bytes(write(grown.parent / "2.csv", rows_of(2)).read_bytes().replace(b"\n", b"\r"))
    append(other_ends, grown)
    before = files_in(grown)
    for path, known in ((again, "1.csv"), (grown.parent / "0.csv", "0.csv"), (other_ends, "cr.csv")):
        with pytest.raises(DataError, match=f"already contains this file as {known}"):
            append(path, grown)
    assert files_in(grown) == before


def test_append_accepts_several_files_without_rows(grown: Path) -> None:
    """Regression test: files of hours without events are identical, but they are not duplicates of each other."""
    for number in (1, 2):
        folder = grown.parent / f"day{number}"
        folder.mkdir()
        write(folder / "a.csv", rows_of(number))
        for name in ("b.csv", "c.csv"):
            write(folder / name, [])
        (folder / "d.csv").touch()
        pq.write_table(pa.table({name: pa.array([], pa.string()) for name in NAMES}), folder / "e.parquet")
        assert len(append(folder, grown).generations[-1].inputs) == 1
    (grown.parent / "half.csv.gz").write_bytes(gzip.compress(b"user,item\n" * 99)[:20])
    with pytest.raises(DataError, match="the file is complete"):
        append(grown.parent / "half.csv.gz", grown)
    with pytest.raises(DataError, match="no usable events"):
        append(folder / "d.csv", grown)


def test_generation_earlier_can_be_read_and_restored(grown: Path) -> None:
    contents = [content(grown)]
    for number in (1, 2, 3):
        append(write(grown.parent / f"{number}.csv", rows_of(number)), grown)
        contents.append(content(grown))
    assert Dataset.open(grown, generation=1).card.counts.events == 6
    result = CliRunner().invoke(app, ["restore", str(grown), "--generation", "1"])
    assert result.exit_code == 0
    assert "generation 1, 6 events" in result.output
    assert content(grown) == contents[1]
    for number in (2, 3):
        append(grown.parent / f"{number}.csv", grown)
    assert content(grown) == contents[3]


def test_generation_with_deleted_files_is_not_restored(grown: Path) -> None:
    for number in range(1, 13):
        append(write(grown.parent / f"{number}.csv", rows_of(number)), grown)
    before = files_in(grown)
    assert (grown / "cards" / "000001.json").exists()  # the card of the generation still exists
    for number in (1, 13, -1):
        with pytest.raises(DataError, match=r"this generation is not available.*Choose one of .*11, 12"):
            restore(grown, number)
        with pytest.raises(DataError, match="this generation is not available"):
            Dataset.open(grown, generation=number)
    assert files_in(grown) == before


def test_append_of_duplicates_only_adds_no_events(grown: Path) -> None:
    first = write(grown.parent / "1.csv", rows_of(1))
    append(first, grown, overrides={"duplicates": "drop"})
    before = content(grown)
    repeats = write(grown.parent / "repeats.csv", rows_of(1)[:1])
    card = append(repeats, grown, overrides={"duplicates": "drop"})
    assert (card.generation, card.counts.duplicates_dropped) == (2, 1)
    assert content(grown) == before
    for number in (2, 3):
        append(write(grown.parent / f"{number}.csv", rows_of(number)), grown)
    after = content(grown)
    compact(grown)
    assert content(grown) == after


def test_append_many_small_files_leaves_few_layers(grown: Path) -> None:
    for number in range(1, 13):
        append(write(grown.parent / f"{number}.csv", rows_of(number)), grown)
    card = DatasetCard.load(grown)
    assert len(card.layers) <= 5
    assert sum(layer.events for layer in card.layers) == card.counts.events == 39
    assert len(list((grown / "layers").iterdir())) < 20  # only layers of the last few generations are retained


def test_append_rejects_options_the_dataset_does_not_have(grown: Path) -> None:
    path = write(grown.parent / "1.csv", rows_of(1))
    for overrides, problem in (
        ({"log.actions": '{"like": "click"}'}, "has different actions: click"),
        ({"log.categories": "[]"}, "the dataset has different event features: price, tab"),
        ({"log.categories": []}, "the dataset has different event features: price, tab"),
        ({"log.time": "none"}, "has times"),
    ):
        with pytest.raises(DataError, match=problem):
            append(path, grown, overrides=overrides)
    with pytest.raises(UserError, match=r"overrides=\['items'\]: must be a mapping of option names to values"):
        append(path, grown, overrides=["items"])  # type: ignore[arg-type]
    append(path, grown, overrides={"max_bad_fraction": 0.5, "log.user": Path("user")})


def test_dataset_scan_equals_rows_across_layers(grown: Path) -> None:
    for number in (1, 2):
        append(write(grown.parent / f"{number}.csv", rows_of(number)), grown)
    dataset = Dataset.open(grown)
    scanned = [(first, group.lists["item_ids"]) for first, group in dataset.scan(["item_ids"])]
    values, offsets = dataset.rows(np.arange(dataset.num_samples)).lists["item_ids"]
    assert np.array_equal(np.concatenate([values for _, (values, _) in scanned]), values)
    assert [int(first + len(o) - 1) for first, (_, o) in scanned][-1] == dataset.num_samples == len(offsets) - 1


def test_stream_ingestion_equals_append_of_the_same_events(tmp_path: Path) -> None:
    """Covers ratings, duplicates, and attributes of new items and users that are columns of the log."""
    log = LogColumns(time="t", rating="stars", actions={"click": "click"})
    prepare_options: dict[str, Any] = {
        "log": log,
        "min_rating": 2.0,
        "positive_rating": 4.0,
        "duplicates": "drop",
        "item_columns": TableColumns(categories=("brand",)),
        "user_columns": TableColumns(categories=("level",)),
    }
    rows = [f"u{k % 5},i{k % 7},{100 + k // 2},{1 + k % 5},{k % 2},b{k % 7},l{k % 5}" for k in range(40)]
    header = "user,item,t,stars,click,brand,level"
    (tmp_path / "first.csv").write_text("\n".join([header, *rows[:4]]) + "\n")
    (tmp_path / "incoming").mkdir()
    rest = tmp_path / "incoming" / "rest.csv"
    rest.write_text("\n".join([header, *rows[4:], *rows[10:14]]) + "\n")
    for name in ("appended", "streamed"):
        prepare("log", tmp_path / "first.csv", tmp_path / name, **prepare_options)
    append(rest, tmp_path / "appended")
    folder = tmp_path / "streamed"
    options = stream_log_options(DatasetCard.load(folder), None, 1.0)
    source = open_stream_source(str(tmp_path / "incoming"), options)
    reports: list[str] = []
    stream = StreamIngester(
        source, str(tmp_path / "incoming"), folder, WindowRule(events=40), options, report=reports.append
    )
    window = stream.next_window(lambda: True)
    assert window is not None
    assert content(folder) == content(tmp_path / "appended")
    assert window[0].counts == DatasetCard.load(tmp_path / "appended").counts
    assert not reports
    # The source stops sending a field.
    (tmp_path / "incoming" / "z.csv").write_text(
        "\n".join([header, *(f"u1,i{k},200,5,1,,l1" for k in range(40))]) + "\n"
    )
    assert stream.next_window(lambda: True) is not None
    assert reports == ["column 'brand' is blank in all events of this window; check the name of the field"]


def test_append_reads_side_tables_as_prepared(tmp_path: Path) -> None:
    """Brands are numbers here, which would be inferred to be numeric without the option."""
    (tmp_path / "a.csv").write_text("user,item\nu,1\nu,2\n")
    (tmp_path / "b.csv").write_text("user,item\nu,3\nu,4\n")
    (tmp_path / "items.csv").write_text("item,brand\n1,10\n2,20\n")
    (tmp_path / "more.csv").write_text("item,brand\n3,20\n")
    columns = TableColumns(categories=("brand",))
    prepare("log", tmp_path / "a.csv", tmp_path / "data", items=str(tmp_path / "items.csv"), item_columns=columns)
    arguments = ["append", str(tmp_path / "b.csv"), str(tmp_path / "data"), "--items", str(tmp_path / "more.csv")]
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None, result.exception
    brands = {item["item_key"]: item["item_brand"] for item in Dataset.open(tmp_path / "data").items().to_pylist()}
    assert brands == {"1": 1, "2": 2, "3": 2, "4": 0}
    assert "1 of 2 new items have no features (brand)" in result.output
