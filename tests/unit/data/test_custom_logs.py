"""Custom logs: JSON lines, folders and globs, the actions option, and side tables of items and users."""

import csv
import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nestrec.base.errors import DataError, UserError
from nestrec.cli.data_output import show_actions, show_card
from nestrec.data.dataset import Dataset
from nestrec.data.dataset_card import DatasetCard
from nestrec.data.formats.format_registry import FORMATS, options_from_text, prepare
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
    """Returns the (item key, actions) pairs of each user key, in order."""
    dataset = Dataset.open(folder)
    rows = dataset.rows(np.arange(dataset.num_samples))
    keys = ["", *dataset.items().column("item_key").to_pylist()]
    (items, offsets), actions = rows.lists["item_ids"], rows.lists["actions"][0]
    pairs = [(keys[i], int(a)) for i, a in zip(items, actions, strict=True)]
    users = dataset.user_keys(rows.indices)
    return {user: pairs[a:b] for user, a, b in zip(users, offsets[:-1], offsets[1:], strict=True)}


EXPECTED = {"ann": [("7", 1), ("x", 2)], "bob": [("7", 0), ("9", 0)]}


@pytest.mark.parametrize("name", ["log.jsonl", "log.jsonl.gz", "log.ndjson", "events.log", "events.gz"])
def test_json_lines_are_read_plain_and_gzipped(tmp_path: Path, name: str) -> None:
    data = lines(EVENTS).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    prepare("log", tmp_path / name, tmp_path / "out", log=LOG)
    assert histories(tmp_path / "out") == EXPECTED


@pytest.mark.parametrize("pattern", ["days", "days/*.jsonl*", "**/day-*"])
def test_log_folders_and_globs_are_read_in_name_order(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "days").mkdir()
    (tmp_path / "days" / "day-2.jsonl").write_text(lines(EVENTS[2:]))
    (tmp_path / "days" / "day-1.jsonl.gz").write_bytes(gzip.compress(lines(EVENTS[:2]).encode()))
    card = prepare("log", tmp_path / pattern, tmp_path / "out", log=LOG)
    assert histories(tmp_path / "out") == EXPECTED
    assert card.name in ("days", tmp_path.name)
    with pytest.raises(DataError, match="no log files found"):
        prepare("log", tmp_path / "days" / "night-*", tmp_path / "other", log=LOG)


def test_json_lines_bad_line_quarantined_mistyped_field_named(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(lines(EVENTS) + '{"user": \n\n[1]\n')
    card = prepare("log", tmp_path / "log.jsonl", tmp_path / "out", log=LOG, max_bad_fraction=1.0)
    assert (card.counts.events, dict(card.counts.quarantined)) == (4, {"not a JSON object": 2})
    with pytest.raises(DataError, match=r"no line of log.jsonl has this field\. Did you mean 'clicked'"):
        prepare(
            "log",
            tmp_path / "log.jsonl",
            tmp_path / "other",
            max_bad_fraction=1.0,
            log=LogColumns(user="user.id", item="sku", actions={"click": "cliked"}),
        )


def test_json_array_is_rejected_without_printing_content(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text(json.dumps(EVENTS, indent=1))
    with pytest.raises(DataError, match="one JSON value") as raised:
        prepare("log", tmp_path / "log.json", tmp_path / "out", log=LOG)
    assert "ann" not in str(raised.value)


def test_json_lines_duplicates_ignore_field_order(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"user": 1, "item": 2, "x": 3}\n{"x": 3, "item": 2, "user": 1}\n')
    assert prepare("log", tmp_path / "log.jsonl", tmp_path / "out").counts.duplicates_kept == 1
    (tmp_path / "log.jsonl").write_text('{"user": 1, "item": 2, "x": 3}\n{"x": 4, "item": 2, "user": 1}\n')
    assert prepare("log", tmp_path / "log.jsonl", tmp_path / "other").counts.duplicates_kept == 0


def test_log_actions_option_parses_columns_and_values(tmp_path: Path) -> None:
    text = "user,item,clicked,event,a:b\nu,i,1,view,0\nu,j,0,buy,1\n"
    (tmp_path / "log.csv").write_text(text)
    options = options_from_text("log", {"log.actions": "click=clicked,buy=event:buy,odd=a:b,old=event=view"})
    prepare("log", tmp_path / "log.csv", tmp_path / "out", options=options)
    assert histories(tmp_path / "out") == {"u": [("i", 1 | 8), ("j", 2 | 4)]}


def test_simulated_new_items_appear_only_as_last_events(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    rows = [f"{user},{draw.integers(40)},{at}" for user in range(60) for at in range(6)]
    (tmp_path / "log.csv").write_text("\n".join(["user,item,at", *rows]) + "\n")
    log = LogColumns(time="at")
    full_card = prepare("log", tmp_path / "log.csv", tmp_path / "full", log=log)
    card = prepare("log", tmp_path / "log.csv", tmp_path / "new", log=log, simulated_new_items=0.2)
    dropped = card.counts.filtered["made new"]
    assert card.counts.users == full_card.counts.users == 60
    assert card.counts.events == full_card.counts.events - dropped
    filtered_items, all_items = items_of(tmp_path / "new"), items_of(tmp_path / "full")
    new = {item for items in all_items.values() for item in items} - {
        i for items in filtered_items.values() for i in items[:-1]
    }
    assert 4 <= len(new) <= 12
    for user, items in all_items.items():
        assert filtered_items[user] == [i for i in items[:-1] if i not in new] + items[-1:]


def items_of(folder: Path) -> dict[str, list[str]]:
    """Returns the item keys of each user key, in order."""
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


def test_side_tables_of_items_and_users_become_features(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text(
        "item,title,brand_id,price,colors\n1,One,7,0.5,red|blue\n2,Two,8,1.5,\n9,Nine,7,9.5,red\n3,Three,8,,blue\n"
    )
    users = {"user": ["u2", "u1"], "country": ["NO", None], "langs": [["no", "en"], []], "age": [30, 40]}
    pq.write_table(pa.table(users), tmp_path / "users.parquet")
    dataset = with_tables(
        tmp_path,
        items=str(tmp_path / "items.csv"),
        users=str(tmp_path / "users.parquet"),
        item_columns={"lists": ("colors",), "list_separator": "|"},
    )
    kinds = {f.name: f.kind for f in dataset.card.item_features}
    assert kinds == {
        "title": "text",
        "title_bag": "bag",
        "brand_id": "category",
        "price": "category",
        "colors": "categories",
    }
    items = {row["item_key"]: row for row in dataset.items().to_pylist()}
    assert [items[key]["item_title"] for key in "123"] == ["One", "Two", "Three"]
    brands = dataset.vocabulary("item_brand_id").column("key").to_pylist()
    assert [brands[items[key]["item_brand_id"] - 1] for key in "123"] == ["7", "8", "8"]
    prices = dataset.vocabulary("item_price").column("key").to_pylist()
    assert (prices, [items[key]["item_price"] for key in "123"]) == (["up to 0.5", "above 0.5 to 1.5"], [1, 2, 0])
    colors = dataset.vocabulary("item_colors").column("key").to_pylist()
    assert [[colors[i - 1] for i in items[key]["item_colors"]] for key in "123"] == [["red", "blue"], [], ["blue"]]
    rows = dataset.rows(np.array([0, 1]))
    countries = dataset.vocabulary("user_country").column("key").to_pylist()
    assert (countries, rows.scalars["user_country"].tolist()) == (["NO"], [0, 1])
    assert {f.name: f.kind for f in dataset.card.user_features}["langs"] == "categories"


def test_side_table_in_json_lines_with_custom_key(tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_text('{"id": 1, "name": "One"}\n{"id": 2, "kind": {"top": "a"}}\n')
    dataset = with_tables(tmp_path, items=str(tmp_path / "items.jsonl"), item_columns={"key": "id"})
    assert [f.name for f in dataset.card.item_features] == ["name", "name_bag", "kind.top"]
    assert [row["item_name"] for row in dataset.items().to_pylist()] == ["One", "", ""]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"item_columns": {"categories": ("brnd",)}},
            "item_columns.categories=brnd: no such column.*Did you mean 'brand'",
        ),
        ({"item_columns": {"key": "brand"}}, "the table has no row for any id in the log"),
        ({"items": None, "item_columns": {"key": "brand"}}, "--items FILE"),
    ],
)
def test_side_table_with_wrong_columns_is_rejected(tmp_path: Path, options: dict[str, object], message: str) -> None:
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
def test_side_table_lists_in_text_are_parsed(tmp_path: Path, cells: list[str], columns: dict[str, object]) -> None:
    with (tmp_path / "items.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("item", "tags"), *zip("123", cells, strict=True)])
    dataset = with_tables(tmp_path, items=str(tmp_path / "items.csv"), item_columns=columns)
    assert [(f.name, f.kind) for f in dataset.card.item_features] == [("tags", "categories")]
    keys = dataset.vocabulary("item_tags").column("key").to_pylist()
    lists = [[keys[i - 1] for i in row["item_tags"]] for row in dataset.items().to_pylist()]
    assert lists == [["red", "dark, blue"], ["red"], []]


def test_side_table_equal_length_fractions_become_a_vector(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text('item,picture,sizes\n1,"[0.5, 2]","[36, 38]"\n2,"[1, 4]","[40, 42]"\n')
    dataset = with_tables(tmp_path, items=str(tmp_path / "items.csv"))
    kinds = {feature.name: feature for feature in dataset.card.item_features}
    assert (kinds["picture"].kind, kinds["sizes"].kind) == ("vector", "categories")
    assert dataset.vectors(kinds["picture"])[1:3].tolist() == [[0.5, 2], [1, 4]]


@pytest.mark.parametrize(
    ("header", "options", "message"),
    [
        ("item,id,brand", {}, r"item_columns=id: the feature collides with the dataset's own column item_id"),
        ("item,brand,key", {}, r"item_columns=key: .*--item_columns.ignored_columns key"),
        (
            "item,a_counts,a",
            {"item_columns": {"lists": ("a",)}},
            "=a_counts: the dataset uses this name for the number of values",
        ),
        ("item,title,title_bag", {}, "=title_bag: 2 features of the item have this name"),
    ],
)
def test_side_table_feature_name_collisions_are_rejected(
    tmp_path: Path, header: str, options: dict[str, object], message: str
) -> None:
    (tmp_path / "items.csv").write_text(f"{header}\n1,70,x\n2,80,y\n")
    with pytest.raises(UserError, match=message):
        with_tables(tmp_path, items=str(tmp_path / "items.csv"), **options)


def test_side_table_separator_is_configurable(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("item;brand\n1;a,b\n2;c\n")
    table = str(tmp_path / "items.csv")
    with pytest.raises(UserError, match=r"Known names: item;brand.*--item_columns.separator ';'"):
        with_tables(tmp_path, items=table)
    dataset = with_tables(tmp_path, items=table, item_columns={"separator": ";"})
    assert dataset.vocabulary("item_brand").column("key").to_pylist() == ["a,b", "c"]
    for wrong in ("ab", "§", '"', "\n"):
        with pytest.raises(UserError, match=r"separator=.*: unsupported field separator"):
            with_tables(tmp_path, items=table, item_columns={"separator": wrong})


def test_prepare_prints_action_fractions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.csv").write_text("user,item,event\nu1,1,view\nu2,2,view\nu2,3,buy\nu1,1,other\n")
    prepare("log", tmp_path / "log.csv", tmp_path / "out", log={"actions": {"view": "event:view", "buy": "event:buy"}})
    prepare("log", tmp_path / "log.csv", tmp_path / "none")
    show_actions(tmp_path / "out")
    show_actions(tmp_path / "none")
    assert capsys.readouterr().out == "actions: view 50.0%, buy 25.0%\n"


def test_prepare_warns_of_missing_table_rows_and_null_like_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log.csv").write_text("user,item\nu1,1\nNULL,2\nu2,3\nNULL,1\nNone,1\n")
    (tmp_path / "items.csv").write_text("item,brand\n1,a\n1,b\n2.0,c\n")
    card = prepare("log", tmp_path / "log.csv", tmp_path / "out", items=str(tmp_path / "items.csv"))
    show_card(DatasetCard.load(tmp_path / "out"), tmp_path / "out")
    printed = capsys.readouterr().out
    assert [note.split(":")[0] for note in card.notes] == [
        "2 events have the user 'NULL'",
        "1 event has the user 'None'",
        f"1 row of --items {tmp_path / 'items.csv'} repeats the id of an earlier row",
        f"2 of 3 items have no row in --items {tmp_path / 'items.csv'}",
    ]
    assert all(f"WARNING: {note}" in printed for note in card.notes)
    (tmp_path / "items.csv").write_text("item,brand\n1.0,a\n")
    with pytest.raises(UserError, match=r"an id in the table is '1\.0', an id in the log is '1'"):
        prepare("log", tmp_path / "log.csv", tmp_path / "b", items=str(tmp_path / "items.csv"))


def test_number_buckets_have_equal_counts_and_keep_equal_values(tmp_path: Path) -> None:
    values = [*range(100), *[1000] * 100]
    (tmp_path / "log.csv").write_text("user,item\n" + "".join(f"u,{i}\n" for i in [*range(200), 0, 0]))
    (tmp_path / "items.csv").write_text("item,price\n" + "".join(f"{i},{v}\n" for i, v in enumerate(values)))
    prepare("log", tmp_path / "log.csv", tmp_path / "out", items=str(tmp_path / "items.csv"))
    ids = Dataset.open(tmp_path / "out").items().column("item_price").to_numpy()
    assert ids.tolist() == sorted(ids.tolist())
    counts = np.bincount(ids)[1:]
    assert (counts[:-1].min(), counts[:-1].max(), counts[-1]) == (12, 13, 100)


def test_format_options_of_every_format_are_range_checked(tmp_path: Path) -> None:
    for name in ("log", "kuairand"):
        with pytest.raises(UserError, match="max_bad_fraction"):
            options_from_text(name, {"max_bad_fraction": "2"})


def test_plugin_format_has_its_own_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    FORMATS.__dict__.pop("_external", None)  # installed packages are discovered once and cached
    (tmp_path / "log.txt").write_text("user|item\nu|1\nu|2\n")
    try:
        card = prepare("far", tmp_path / "log.txt", tmp_path / "out", options=options_from_text("far", {"sign": "|"}))
    finally:
        FORMATS.__dict__.pop("_external", None)
    assert (card.source_format, card.counts.events) == ("far", 2)


class Frame:
    """Stands for a DataFrame of another library that exports its columns as an Arrow stream only."""

    def __init__(self, **columns: object):
        self._table = pa.table(columns)

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


def test_in_memory_tables_are_prepared_and_appended(tmp_path: Path) -> None:
    for events in (pa.table({"user": ["ann"], "item": [7]}), Frame(user=["ann"], item=[7.0])):
        out = tmp_path / type(events).__name__
        card = prepare("log", events, out)
        assert (card.counts.events, card.name) == (1, "table.parquet")
        assert append(Frame(user=["bob", "ann"], item=[8, 9]), out).counts.users == 2
        with pytest.raises(DataError, match="already contains this file"):
            append(Frame(user=["bob", "ann"], item=[8, 9]), out)


def test_in_memory_table_unsupported_by_parquet_is_rejected(tmp_path: Path) -> None:
    spans = pa.array([None], pa.month_day_nano_interval())
    with pytest.raises(DataError, match="input=Frame: the table cannot be written as Parquet"):
        prepare("log", Frame(user=["ann"], item=[7], span=spans), tmp_path / "out")
