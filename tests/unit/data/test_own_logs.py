"""Logs of one's own: JSON lines, folders and patterns of files, actions named in a word, tables of items and users."""

import csv
import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nestrec.base.errors import DataError, UserError
from nestrec.cli.data_output import show_card
from nestrec.data.dataset import Dataset
from nestrec.data.dataset_card import DatasetCard
from nestrec.data.formats.format_registry import FORMATS, prepare, typed_options
from nestrec.data.incremental.append import append
from nestrec.data.prepare.prepare_options import LogColumns

EVENTS = [
    {"user": {"id": "ann"}, "sku": 7, "at": 100, "clicked": True},
    {"user": {"id": "ann"}, "sku": "x", "at": 200, "event": "buy"},
    {"at": 50, "sku": 7, "user": {"id": "bob"}, "clicked": False},
    {"user": {"id": "bob"}, "sku": 9, "at": 300, "clicked": None, "tags": ["a", "b"]},
]
LOG = LogColumns(user="user.id", item="sku", time="at", actions={"click": "clicked", "buy": "event:buy"})


def lines(events: list[dict[str, object]]) -> str:
    return "".join(json.dumps(event) + "\n" for event in events)


def histories(folder: Path) -> dict[str, list[tuple[str, int]]]:
    """User key to (item key, actions) in order."""
    dataset = Dataset.open(folder)
    rows = dataset.rows(np.arange(dataset.num_samples))
    keys = ["", *dataset.items().column("item_key").to_pylist()]
    (items, offsets), actions = rows.lists["item_ids"], rows.lists["actions"][0]
    pairs = [(keys[i], int(a)) for i, a in zip(items, actions, strict=True)]
    users = dataset.user_keys(rows.indices)
    return {user: pairs[a:b] for user, a, b in zip(users, offsets[:-1], offsets[1:], strict=True)}


EXPECTED = {"ann": [("7", 1), ("x", 2)], "bob": [("7", 0), ("9", 0)]}


@pytest.mark.parametrize("name", ["log.jsonl", "log.jsonl.gz", "log.ndjson", "events.log", "events.gz"])
def test_json_lines_are_read_plain_and_gzip(tmp_path: Path, name: str) -> None:
    data = lines(EVENTS).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    prepare("log", tmp_path / name, tmp_path / "out", log=LOG)
    assert histories(tmp_path / "out") == EXPECTED


@pytest.mark.parametrize("given", ["days", "days/*.jsonl*", "**/day-*"])
def test_folders_and_patterns_are_read_in_order_of_name(tmp_path: Path, given: str) -> None:
    (tmp_path / "days").mkdir()
    (tmp_path / "days" / "day-2.jsonl").write_text(lines(EVENTS[2:]))
    (tmp_path / "days" / "day-1.jsonl.gz").write_bytes(gzip.compress(lines(EVENTS[:2]).encode()))
    card = prepare("log", tmp_path / given, tmp_path / "out", log=LOG)
    assert histories(tmp_path / "out") == EXPECTED
    assert card.name in ("days", tmp_path.name)
    with pytest.raises(DataError, match="holds no log files"):
        prepare("log", tmp_path / "days" / "night-*", tmp_path / "other", log=LOG)


def test_a_bad_line_of_json_is_set_aside_and_a_mistyped_field_is_named(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(lines(EVENTS) + '{"user": \n\n[1]\n')
    card = prepare("log", tmp_path / "log.jsonl", tmp_path / "out", log=LOG, max_bad_share=1.0)
    assert (card.counts.events, dict(card.counts.quarantined)) == (4, {"not a JSON object": 2})
    with pytest.raises(DataError, match=r"is a field of no line of log.jsonl\. Did you mean 'clicked'"):
        prepare(
            "log",
            tmp_path / "log.jsonl",
            tmp_path / "other",
            max_bad_share=1.0,
            log=LogColumns(user="user.id", item="sku", actions={"click": "cliked"}),
        )


def test_json_that_is_no_lines_is_refused_without_its_content(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text(json.dumps(EVENTS, indent=1))
    with pytest.raises(DataError, match="one JSON value") as refused:
        prepare("log", tmp_path / "log.json", tmp_path / "out", log=LOG)
    assert "ann" not in str(refused.value)


def test_equal_lines_are_duplicates_whatever_the_order_of_their_fields(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"user": 1, "item": 2, "x": 3}\n{"x": 3, "item": 2, "user": 1}\n')
    assert prepare("log", tmp_path / "log.jsonl", tmp_path / "out").counts.duplicates_kept == 1
    (tmp_path / "log.jsonl").write_text('{"user": 1, "item": 2, "x": 3}\n{"x": 4, "item": 2, "user": 1}\n')
    assert prepare("log", tmp_path / "log.jsonl", tmp_path / "other").counts.duplicates_kept == 0


def test_actions_are_named_in_a_word(tmp_path: Path) -> None:
    text = "user,item,clicked,event,a:b\nu,i,1,view,0\nu,j,0,buy,1\n"
    (tmp_path / "log.csv").write_text(text)
    options = typed_options("log", {"log.actions": "click=clicked,buy=event:buy,odd=a:b,old=event=view"})
    prepare("log", tmp_path / "log.csv", tmp_path / "out", options=options)
    assert histories(tmp_path / "out") == {"u": [("i", 1 | 8), ("j", 2 | 4)]}


def test_items_that_are_made_new_are_left_to_the_last_events(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    rows = [f"{user},{draw.integers(40)},{at}" for user in range(60) for at in range(6)]
    (tmp_path / "log.csv").write_text("\n".join(["user,item,at", *rows]) + "\n")
    log = LogColumns(time="at")
    whole = prepare("log", tmp_path / "log.csv", tmp_path / "whole", log=log)
    card = prepare("log", tmp_path / "log.csv", tmp_path / "new", log=log, new_items=0.2)
    dropped = card.counts.filtered["made new"]
    assert card.counts.users == whole.counts.users == 60
    assert card.counts.events == whole.counts.events - dropped
    kept, found = items_of(tmp_path / "new"), items_of(tmp_path / "whole")
    new = {item for items in found.values() for item in items} - {i for items in kept.values() for i in items[:-1]}
    assert 4 <= len(new) <= 12
    for user, items in found.items():
        assert kept[user] == [i for i in items[:-1] if i not in new] + items[-1:]


def items_of(folder: Path) -> dict[str, list[str]]:
    """User key to item keys in order."""
    dataset = Dataset.open(folder)
    rows = dataset.rows(np.arange(dataset.num_samples))
    keys = np.array(["", *dataset.items().column("item_key").to_pylist()])
    items, offsets = rows.lists["item_ids"]
    users = dataset.user_keys(rows.indices)
    return {user: keys[items[a:b]].tolist() for user, a, b in zip(users, offsets[:-1], offsets[1:], strict=True)}


def with_tables(folder: Path, **options: object) -> Dataset:
    (folder / "log.csv").write_text("user,item\nu1,1\nu1,2\nu2,3\nu2,1\n")
    prepare("log", folder / "log.csv", folder / "out", force=True, **options)
    return Dataset.open(folder / "out")


def test_tables_of_items_and_users_become_features(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text(
        "item,title,brand_id,price,colours\n1,One,7,0.5,red|blue\n2,Two,8,1.5,\n9,Nine,7,9.5,red\n3,Three,8,,blue\n"
    )
    users = {"user": ["u2", "u1"], "country": ["NO", None], "langs": [["no", "en"], []], "age": [30, 40]}
    pq.write_table(pa.table(users), tmp_path / "users.parquet")
    dataset = with_tables(
        tmp_path,
        items=str(tmp_path / "items.csv"),
        users=str(tmp_path / "users.parquet"),
        item_columns={"lists": ("colours",), "list_separator": "|"},
    )
    kinds = {f.name: f.kind for f in dataset.card.item_features}
    assert kinds == {
        "title": "text",
        "title_bag": "bag",
        "brand_id": "category",
        "price": "category",
        "colours": "categories",
    }
    items = {row["item_key"]: row for row in dataset.items().to_pylist()}
    assert [items[key]["item_title"] for key in "123"] == ["One", "Two", "Three"]
    brands = dataset.vocabulary("item_brand_id").column("key").to_pylist()
    assert [brands[items[key]["item_brand_id"] - 1] for key in "123"] == ["7", "8", "8"]
    prices = dataset.vocabulary("item_price").column("key").to_pylist()
    assert (prices, [items[key]["item_price"] for key in "123"]) == (["up to 0.5", "above 0.5 to 1.5"], [1, 2, 0])
    colours = dataset.vocabulary("item_colours").column("key").to_pylist()
    assert [[colours[i - 1] for i in items[key]["item_colours"]] for key in "123"] == [["red", "blue"], [], ["blue"]]
    rows = dataset.rows(np.array([0, 1]))
    countries = dataset.vocabulary("user_country").column("key").to_pylist()
    assert (countries, rows.scalars["user_country"].tolist()) == (["NO"], [0, 1])
    assert {f.name: f.kind for f in dataset.card.user_features}["langs"] == "categories"


def test_a_table_in_json_lines_with_a_key_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_text('{"id": 1, "name": "One"}\n{"id": 2, "kind": {"top": "a"}}\n')
    dataset = with_tables(tmp_path, items=str(tmp_path / "items.jsonl"), item_columns={"key": "id"})
    assert [f.name for f in dataset.card.item_features] == ["name", "name_bag", "kind.top"]
    assert [row["item_name"] for row in dataset.items().to_pylist()] == ["One", "", ""]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"item_columns": {"categories": ("brnd",)}}, "item_columns.categories = 'brnd'.*\n.*did you mean 'brand'"),
        ({"item_columns": {"key": "brand"}}, "has no row of any id in the log"),
        ({"items": None, "item_columns": {"key": "brand"}}, "--items FILE"),
    ],
)
def test_a_table_that_cannot_be_meant_is_refused(tmp_path: Path, options: dict[str, object], message: str) -> None:
    (tmp_path / "items.csv").write_text("item,brand\n1,a\n")
    with pytest.raises(UserError, match=message):
        with_tables(tmp_path, **{"items": str(tmp_path / "items.csv"), **options})


@pytest.mark.parametrize(
    ("cells", "columns"),
    [
        (["['red', 'dark, blue']", "['red']", "[]"], {}),
        (['["red", "dark, blue"]', '["red"]', "[]"], {}),
        (["[red| dark, blue]", "[red]", ""], {"lists": ("tags",), "list_separator": "|"}),
        (["red|dark, blue", "red", ""], {"lists": ("tags",), "list_separator": "|"}),
    ],
)
def test_lists_in_text_are_read_as_they_are_written(
    tmp_path: Path, cells: list[str], columns: dict[str, object]
) -> None:
    with (tmp_path / "items.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("item", "tags"), *zip("123", cells, strict=True)])
    dataset = with_tables(tmp_path, items=str(tmp_path / "items.csv"), item_columns=columns)
    assert [(f.name, f.kind) for f in dataset.card.item_features] == [("tags", "categories")]
    keys = dataset.vocabulary("item_tags").column("key").to_pylist()
    found = [[keys[i - 1] for i in row["item_tags"]] for row in dataset.items().to_pylist()]
    assert found == [["red", "dark, blue"], ["red"], []]


def test_equally_many_fractions_in_text_are_a_vector_and_whole_numbers_are_not(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text('item,picture,sizes\n1,"[0.5, 2]","[36, 38]"\n2,"[1, 4]","[40, 42]"\n')
    dataset = with_tables(tmp_path, items=str(tmp_path / "items.csv"))
    kinds = {feature.name: feature for feature in dataset.card.item_features}
    assert (kinds["picture"].kind, kinds["sizes"].kind) == ("vector", "categories")
    assert dataset.vectors(kinds["picture"])[1:3].tolist() == [[0.5, 2], [1, 4]]


@pytest.mark.parametrize(
    ("header", "options", "message"),
    [
        ("item,id,brand", {}, r"item_columns=id: would take the place of the dataset's own column item_id"),
        ("item,brand,key", {}, r"item_columns = 'key'.*\n.*--item_columns.left_out key"),
        ("item,a_counts,a", {"item_columns": {"lists": ("a",)}}, "'a_counts': is what the dataset calls how many"),
        ("item,title,title_bag", {}, "'title_bag': is the name of 2 features of the item"),
    ],
)
def test_a_feature_never_takes_the_place_of_ids_or_of_another(
    tmp_path: Path, header: str, options: dict[str, object], message: str
) -> None:
    (tmp_path / "items.csv").write_text(f"{header}\n1,70,x\n2,80,y\n")
    with pytest.raises(UserError, match=message):
        with_tables(tmp_path, items=str(tmp_path / "items.csv"), **options)


def test_a_table_may_have_a_separator_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("item;brand\n1;a,b\n2;c\n")
    given = str(tmp_path / "items.csv")
    with pytest.raises(UserError, match=r"known names: item;brand.*--item_columns.separator ';'"):
        with_tables(tmp_path, items=given)
    dataset = with_tables(tmp_path, items=given, item_columns={"separator": ";"})
    assert dataset.vocabulary("item_brand").column("key").to_pylist() == ["a,b", "c"]
    for wrong in ("ab", "§", '"', "\n"):
        with pytest.raises(UserError, match=r"separator=.*: cannot separate fields"):
            with_tables(tmp_path, items=given, item_columns={"separator": wrong})


def test_tables_that_fit_a_part_of_the_log_and_ids_that_look_missing_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log.csv").write_text("user,item\nu1,1\nNULL,2\nu2,3\nNULL,1\n")
    (tmp_path / "items.csv").write_text("item,brand\n1,a\n1,b\n2.0,c\n")
    card = prepare("log", tmp_path / "log.csv", tmp_path / "out", items=str(tmp_path / "items.csv"))
    show_card(DatasetCard.load(tmp_path / "out"), tmp_path / "out")
    told = capsys.readouterr().out
    assert [note.split(":")[0] for note in card.notes] == [
        "2 events have the user 'NULL'",
        f"1 rows of --items {tmp_path / 'items.csv'} repeat the id of an earlier row",
        f"2 of 3 items have no row in --items {tmp_path / 'items.csv'}",
    ]
    assert all(f"WARNING: {note}" in told for note in card.notes)
    (tmp_path / "items.csv").write_text("item,brand\n1.0,a\n")
    with pytest.raises(UserError, match=r"one there is '1\.0', one in the log '1'"):
        prepare("log", tmp_path / "log.csv", tmp_path / "b", items=str(tmp_path / "items.csv"))


def test_ranges_hold_equally_many_rows_and_never_part_equal_values(tmp_path: Path) -> None:
    values = [*range(100), *[1000] * 100]
    (tmp_path / "log.csv").write_text("user,item\n" + "".join(f"u,{i}\n" for i in [*range(200), 0, 0]))
    (tmp_path / "items.csv").write_text("item,price\n" + "".join(f"{i},{v}\n" for i, v in enumerate(values)))
    prepare("log", tmp_path / "log.csv", tmp_path / "out", items=str(tmp_path / "items.csv"))
    ids = Dataset.open(tmp_path / "out").items().column("item_price").to_numpy()
    assert ids.tolist() == sorted(ids.tolist())
    counts = np.bincount(ids)[1:]
    assert (counts[:-1].min(), counts[:-1].max(), counts[-1]) == (12, 13, 100)


def test_options_of_all_formats_are_bound(tmp_path: Path) -> None:
    for name in ("log", "kuairand"):
        with pytest.raises(UserError, match="max_bad_share"):
            typed_options(name, {"max_bad_share": "2"})


def test_a_foreign_format_has_options_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "foreign_format.py").write_text(
        "from nestrec.base.config import config\n"
        "from nestrec.data.formats.format_spec import log_format\n"
        "from nestrec.data.prepare.event_parser import EventColumns\n"
        "from nestrec.data.prepare.prepare_options import LogColumns, PrepareOptions\n"
        "from nestrec.data.prepare.raw_rows import DelimitedFormat as Delimited\n"
        "from nestrec.data.prepare.log_source import LogSource, delimited_files\n"
        "@config\n"
        "class Options(PrepareOptions):\n"
        "    sign: str = ';'\n"
        "    'between fields'\n"
        "def open_it(path, options):\n"
        "    how = Delimited(separator=options.sign)\n"
        "    return LogSource('far', 'far', EventColumns.of(LogColumns()), delimited_files([path], how))\n"
        "FORMAT = log_format('From afar.', Options, open_it)\n"
    )
    (tmp_path / "far-1.0.dist-info").mkdir()
    (tmp_path / "far-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: far\nVersion: 1.0\n")
    points = "[nestrec.formats]\nfar = foreign_format:FORMAT\n"
    (tmp_path / "far-1.0.dist-info" / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))
    FORMATS.__dict__.pop("_foreign", None)  # installed packages are looked for once
    (tmp_path / "log.txt").write_text("user|item\nu|1\nu|2\n")
    try:
        card = prepare("far", tmp_path / "log.txt", tmp_path / "out", options=typed_options("far", {"sign": "|"}))
    finally:
        FORMATS.__dict__.pop("_foreign", None)
    assert (card.source_format, card.counts.events) == ("far", 2)


class Frame:
    """A DataFrame of another library: it gives its columns as Arrow, and nothing else."""

    def __init__(self, **columns: object):
        self._table = pa.table(columns)

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


def test_tables_in_memory_are_prepared_and_appended(tmp_path: Path) -> None:
    for events in (pa.table({"user": ["ann"], "item": [7]}), Frame(user=["ann"], item=[7.0])):
        out = tmp_path / type(events).__name__
        card = prepare("log", events, out)
        assert (card.counts.events, card.name) == (1, "table.parquet")
        assert append(Frame(user=["bob", "ann"], item=[8, 9]), out).counts.users == 2
        with pytest.raises(DataError, match="is in the dataset already"):
            append(Frame(user=["bob", "ann"], item=[8, 9]), out)


def test_table_that_parquet_cannot_hold_is_refused(tmp_path: Path) -> None:
    spans = pa.array([None], pa.month_day_nano_interval())
    with pytest.raises(DataError, match="input=Frame: cannot be written as Parquet"):
        prepare("log", Frame(user=["ann"], item=[7], span=spans), tmp_path / "out")
