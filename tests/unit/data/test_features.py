"""Features of custom logs: every kind, from every file format, fitted on the training split and read back."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nestrec.base.errors import DataError, UserError
from nestrec.base.random import mix64
from nestrec.data.dataset import Dataset
from nestrec.data.dataset_card import DatasetCard
from nestrec.data.formats.format_registry import prepare
from nestrec.data.prepare import transform_fitting
from nestrec.data.transform import Transform

NGRAMS = Transform(kind="ngrams", words=(1, 2), characters=(3,), buckets=97, max_ids=12)


def reference_bag(text: str, transform: Transform) -> list[int]:
    """Reference implementation of `Transform.bags`: returns the ids of a text, hashed byte by byte."""
    words = "".join(c if (c.isascii() and c.isalnum()) or ord(c) > 127 else " " for c in text.lower()).split()

    def hashed(seed: int, data: bytes) -> int:
        key = mix64(seed)
        for byte in data:
            key = mix64(key ^ byte)
        return 1 + key % (transform.buckets - 1)

    ids = []
    for run in transform.words:
        runs = [words[start : start + run] for start in range(len(words) - run + 1)]
        ids += [hashed(0x77, b"".join(word.encode() + b" " for word in words)) for words in runs]
    for size in transform.characters:
        for word in words:
            framed = f" {word} "
            ids += [hashed(0x63, framed[at : at + size].encode()) for at in range(len(framed) - size + 1)]
    return ids[: transform.max_ids]


def test_ngram_bags_equal_reference_implementation() -> None:
    texts = ["Red shoes, size 42", "", "Ærlig Blåbær", "a", "one two three four five six seven", None]
    ids, counts = NGRAMS.bags(pa.array(texts).slice(1))
    assert [list(part) for part in np.split(ids, np.cumsum(counts)[:-1])] == [
        reference_bag(text or "", NGRAMS) for text in texts[1:]
    ]


EVENTS: list[dict[str, Any]] = [
    # device is a category, tags a list, `place` and depth are numbers, query is text, seconds is an outcome.
    *(
        {
            "user": f"u{i % 4}",
            "item": f"i{i % 7}",
            "at": 1000 + i,
            "device": ["phone", "tv", None][i % 3],
            "tags": [["a", "b, c"], [], ["c"]][i % 3],
            "place": float(i) if i % 5 else None,
            "depth": i * i,
            "query": ["red shoe", "", "shoe"][i % 3],
            "seconds": 7 * i,
            "brand": f"b{i % 7 // 2}",
            "clicked": i % 2,
        }
        for i in range(40)
    )
]
OPTIONS: dict[str, Any] = {
    "log": {
        "time": "at",
        "actions": {"click": "clicked"},
        "outcome_features": {"watch": "seconds"},
        "categories": ("device",),
        "lists": ("tags",),
        "list_separator": "|",
        "numbers": ("place", "depth"),
        "transforms": {"depth": "log"},
        "num_buckets": 4,
        "texts": ("query",),
    },
    "item_columns": {"categories": ("brand",)},
}


def write_events(path: Path) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(EVENTS), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    else:
        rows = [{**event, "tags": "|".join(event["tags"])} for event in EVENTS]
        lines = [",".join(f'"{"" if v is None else v}"' for v in row.values()) for row in rows]
        path.write_text("\n".join([",".join(EVENTS[0]), *lines]) + "\n")
    return path


def everything(folder: Path) -> dict[str, Any]:
    dataset = Dataset.open(folder)
    rows = dataset.rows(np.arange(dataset.num_samples))
    lists = {name: [part.tolist() for part in np.split(v, o[1:-1])] for name, (v, o) in rows.lists.items()}
    vocabularies = {
        f.column: dataset.vocabulary(f.column).column("key").to_pylist()
        for f in dataset.card.features
        if f.kind in ("category", "categories")
    }
    return {**lists, **vocabularies, "items": dataset.items().to_pylist(), "features": dataset.card.features}


def test_features_of_every_kind_from_every_file_format(tmp_path: Path) -> None:
    contents = {}
    for name in ("log.jsonl", "log.parquet", "log.csv"):
        prepare("log", write_events(tmp_path / name), tmp_path / f"out-{name}", **OPTIONS)
        contents[name] = everything(tmp_path / f"out-{name}")
    assert repr(contents["log.jsonl"]) == repr(contents["log.parquet"]) == repr(contents["log.csv"])

    dataset = Dataset.open(tmp_path / "out-log.csv")
    feature = {f.column: f for f in dataset.card.features}
    rows = dataset.rows(np.arange(dataset.num_samples))
    users = dataset.user_keys(rows.indices)
    tags = dataset.vocabulary("event_tags").column("key").to_pylist()
    for u, user in enumerate(users):
        own_events = [event for event in EVENTS if event["user"] == user]

        def of(column: str, u: int = u) -> list[Any]:
            values, bounds = rows.lists[column]
            return values[bounds[u] : bounds[u + 1]].tolist()

        counts = of("event_tags_counts")
        assert [tags[i - 1] for i in of("event_tags")] == [tag for event in own_events for tag in event["tags"]]
        assert counts == [len(event["tags"]) for event in own_events]
        bags = [reference_bag(event["query"], feature["event_query"].transform) for event in own_events]
        assert (of("event_query"), of("event_query_counts")) == ([i for b in bags for i in b], [len(b) for b in bags])
        assert of("event_watch") == [event["seconds"] for event in own_events]
        assert of("event_depth") == [event["depth"] for event in own_events]
        raw_numbers = np.array([np.nan if e["place"] is None else e["place"] for e in own_events])
        assert of("event_place") == feature["event_place"].transform.bucket_ids(raw_numbers).tolist()
    assert feature["event_watch"].known == "after"
    assert {f.name for f in dataset.card.features if f.known == "before"} == {
        "device", "tags", "place", "depth", "query", "brand"
    }  # fmt: skip
    items = {row["item_key"]: row["item_brand"] for row in dataset.items().to_pylist()}
    brands = dataset.vocabulary("item_brand").column("key").to_pylist()
    assert {key: brands[i - 1] for key, i in items.items()} == {f"i{i}": f"b{i // 2}" for i in range(7)}


def test_transforms_are_fitted_on_the_training_split_only(tmp_path: Path) -> None:
    """Events after the cut, and the last two events of each user, do not affect the transforms."""
    card = prepare("log", write_events(tmp_path / "log.parquet"), tmp_path / "out", fit_fraction=0.5, **OPTIONS)
    training = [event for event in EVENTS if event["at"] < 1020]  # the last two events of each user are later
    depth = np.log1p([event["depth"] for event in training])
    transforms = {f.name: f.transform for f in card.event_features}
    assert (transforms["depth"].mean, transforms["depth"].scale) == (
        pytest.approx(depth.mean()),
        pytest.approx(depth.std()),
    )
    sorted_values = np.sort([event["place"] for event in training if event["place"] is not None])
    assert transforms["place"].bounds == tuple(sorted_values[[3, 7, 11, 15]])
    assert (card.fit.until_ms, card.fit.events) == (1_020_000, 20)
    assert card.fit == DatasetCard.load(tmp_path / "out").fit
    numbers = transforms["depth"].numbers(np.array([0, np.nan, 15 * 15]))
    assert numbers.tolist()[0] == pytest.approx(-depth.mean() / depth.std())
    assert np.isnan(numbers).tolist() == [False, True, False]

    full = prepare("log", tmp_path / "log.parquet", tmp_path / "full", fit_fraction=1.0, **OPTIONS)
    assert full.fit.events == 32  # of 40 events, two per user are held out
    with pytest.raises(DataError, match="fit_until=1970-01-01: no event before this date is left"):
        prepare("log", tmp_path / "log.parquet", tmp_path / "none", fit_until="1970-01-01", **OPTIONS)


def test_features_do_not_depend_on_sort_memory(tmp_path: Path) -> None:
    source = write_events(tmp_path / "log.parquet")
    cards = [
        prepare("log", source, tmp_path / f"out{n}", **OPTIONS, sort_memory_bytes=n, duplicates="drop")
        for n in (1, 1 << 28)
    ]
    assert cards[0].files == cards[1].files
    assert cards[0].features == cards[1].features


def test_value_sample_depends_only_on_positions() -> None:
    values = np.random.default_rng(0).normal(size=50_000).astype(np.float32)
    complete, parts = transform_fitting.ValueSample(1000), transform_fitting.ValueSample(1000)
    complete.add(values)
    for part in np.array_split(values, 17):
        parts.add(part)
    assert np.array_equal(np.sort(complete.values()), np.sort(parts.values()))
    assert 1000 <= complete.values().size <= 2000
    assert np.quantile(complete.values(), 0.5) == pytest.approx(0, abs=0.1)


VECTORS = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.mark.parametrize("source", ["column", "text", "rows of a table", "ids in a file", "ids in an array"])
def test_vectors_are_rows_by_item_id(tmp_path: Path, source: str) -> None:
    (tmp_path / "log.csv").write_text("user,item\nu,b\nu,a\nu,zz\nv,a\n")
    ids = ["a", "b", "c", "a"]
    table = tmp_path / "items.parquet"
    columns: dict[str, Any] = {"item": ids, "kind": ["x", "y", "x", "z"]}
    if source == "column":
        columns["picture"] = VECTORS.tolist()
    if source == "text":
        columns["picture"] = [json.dumps(row.tolist()) for row in VECTORS]
    pq.write_table(pa.table(columns), table)
    np.save(tmp_path / "p.npy", VECTORS)
    (tmp_path / "ids.txt").write_text("\n".join(ids))
    np.save(tmp_path / "ids.npy", np.array(ids))
    array = {"ids in a file": ":ids.txt", "ids in an array": ":ids.npy"}.get(source, "").replace(":", f":{tmp_path}/")
    options: dict[str, Any] = (
        {"items": str(table), "item_columns": {"vectors": ("picture",)}}
        if source in ("column", "text")
        else {"items": str(table), "item_vectors": {"picture": f"{tmp_path / 'p.npy'}{array}"}}
    )
    card = prepare("log", tmp_path / "log.csv", tmp_path / "out", **options)
    [feature] = [f for f in card.item_features if f.kind == "vector"]
    dataset = Dataset.open(tmp_path / "out")
    vectors = dataset.vectors(feature)
    assert isinstance(vectors, np.memmap)
    assert (feature.width, feature.owner) == (3, "item")
    # Padding, item b, the first row of item a, and an item without a vector.
    assert vectors.tolist() == [[0, 0, 0], [3, 4, 5], [0, 1, 2], [0, 0, 0]]
    dataset.verify()


def test_vectors_of_wrong_shape_are_named(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item\nu,b\nu,a\n")
    (tmp_path / "ids.txt").write_text("a\nb\nc\n")
    np.save(tmp_path / "p.npy", VECTORS)
    address = f"{tmp_path / 'p.npy'}:{tmp_path / 'ids.txt'}"
    with pytest.raises(DataError, match="has 4 rows, but the number of ids is different"):
        prepare("log", tmp_path / "log.csv", tmp_path / "out", item_vectors={"picture": address})
    with pytest.raises(DataError, match=r"item_vectors=.*the rows of the array have no ids"):
        prepare("log", tmp_path / "log.csv", tmp_path / "out", item_vectors={"picture": str(tmp_path / "p.npy")})
    table = {"item": ["a", "b"], "picture": [[1.0, 2.0], [1.0]]}
    pq.write_table(pa.table(table), tmp_path / "items.parquet")
    columns = {"vectors": ("picture",)}
    with pytest.raises(DataError, match="picture is not a vector of 2 finite numbers"):
        prepare(
            "log", tmp_path / "log.csv", tmp_path / "o", items=str(tmp_path / "items.parquet"), item_columns=columns
        )


def test_features_named_twice_or_with_wrong_transform_rejected(tmp_path: Path) -> None:
    source = write_events(tmp_path / "log.csv")
    with pytest.raises(UserError, match="log=device: the feature is named more than once"):
        prepare("log", source, tmp_path / "out", log={"categories": ("device",), "texts": ("device",)})
    with pytest.raises(UserError, match=r"log.transforms=plce: not a column of --log.numbers"):
        prepare("log", source, tmp_path / "out", log={"numbers": ("place",), "transforms": {"plce": "log"}})
    with pytest.raises(DataError, match=r"column=brnd: no such column in log.csv.*'brand'"):
        prepare("log", source, tmp_path / "out", item_columns={"categories": ("brnd",)})
    for option in ("word_ngrams", "char_ngrams"):
        with pytest.raises(UserError, match=f"log.hashing.{option}"):
            prepare("log", source, tmp_path / "out", log={"texts": ("device",), "hashing": {option: (-1,)}})


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (
            {"outcome_features": {"price": "paid"}, "numbers": ("price",)},
            "log=price: the feature is named more than once",
        ),
        (
            {"rating": "stars", "outcome_features": {"rating": "paid"}},
            "log=rating: the feature is named more than once",
        ),
        ({"outcome_features": {"watch": "paid"}, "numbers": ("paid",)}, "log=paid: the column is both an outcome"),
        ({"rating": "stars", "categories": ("stars",)}, "log=stars: the column is both an outcome"),
        (
            {"lists": ("tags",), "numbers": ("tags_counts",)},
            "log=tags_counts: the dataset uses this name for the number of values",
        ),
        ({"item": "user"}, "log.item=user: is also the column of users"),
    ],
)
def test_features_with_conflicting_columns_are_rejected(tmp_path: Path, log: dict[str, object], message: str) -> None:
    """Regression test: an outcome was read as if it were known before the event, or was lost silently."""
    (tmp_path / "log.csv").write_text("user,item,price,paid,stars,tags,tags_counts\nu,1,1,2,3,4,5\n")
    with pytest.raises(UserError, match=message):
        prepare("log", tmp_path / "log.csv", tmp_path / "out", log=log)


def test_dataset_card_of_version_1_is_read(tmp_path: Path) -> None:
    prepare("log", write_events(tmp_path / "log.csv"), tmp_path / "out", **OPTIONS)
    plain = json.loads((tmp_path / "out" / "card.json").read_text())
    old = {
        "event_features": [
            {"name": "device", "kind": "category", "vocabulary_size": 3},
            {"name": "watch", "kind": "number"},
        ],
        "item_features": [{"name": "brand", "kind": "category", "vocabulary_size": 5}],
    }
    del plain["fit"]
    (tmp_path / "out" / "card.json").write_text(json.dumps({**plain, **old, "format_version": 1}))
    card = Dataset.open(tmp_path / "out").card
    assert [(f.column, f.owner, f.known) for f in card.features] == [
        ("event_device", "event", "before"),
        ("event_watch", "event", "after"),
        ("item_brand", "item", "before"),
    ]
