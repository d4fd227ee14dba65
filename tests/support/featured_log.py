"""A small log with features of every kind, of events, items and users; some items occur only in the last events."""

import csv
import random
from pathlib import Path
from typing import Any

import numpy as np

from nestrec.data.formats.format_registry import prepare

NUM_USERS, NUM_ITEMS, NUM_NEW, NUM_BRANDS = 36, 30, 4, 5
_START_MS = 1_700_000_000_000

ITEM_FEATURES = ("brand", "tags", "price", "title_bag", "picture")
EVENT_FEATURES = ("device", "place", "query")
USER_FEATURES = ("country", "age", "languages")
EVENT_LIST_FEATURES, USER_VECTOR_FEATURES = ("filters",), ("taste",)
"""A list per event, and a vector per user."""


def write_featured_log(folder: Path, *, seed: int = 0) -> Path:
    """Write and prepare the log, and return the folder of the dataset.

    All items of a user have the same brand. `n0`, `n1`, ... are new items of known brands.
    """
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"i{i}" for i in range(NUM_ITEMS)] + [f"n{i}" for i in range(NUM_NEW)]
    _write(folder / "items.csv", [_item(name, index) for index, name in enumerate(names)])
    _write(folder / "users.csv", [_user(user) for user in range(NUM_USERS)])
    _write(folder / "log.csv", [event for user in range(NUM_USERS) for event in _events(user, draw)])
    vectors = np.random.default_rng(seed).normal(size=(len(names), 3)).astype(np.float32)
    np.save(folder / "pictures.npy", vectors)
    (folder / "ids.txt").write_text("\n".join(names) + "\n")
    np.save(folder / "tastes.npy", np.random.default_rng(seed + 1).normal(size=(NUM_USERS, 5)).astype(np.float32))
    (folder / "user_ids.txt").write_text("".join(f"u{user}\n" for user in range(NUM_USERS)))
    prepare("log", folder / "log.csv", folder / "data", **_options(folder))
    return folder / "data"


def _item(name: str, index: int) -> dict[str, Any]:
    tags = "|".join(f"t{(index + k) % 7}" for k in range(index % 4))
    return {
        "item": name,
        "brand": f"b{index % NUM_BRANDS}",
        "tags": tags,
        "price": "" if index % 6 == 5 else 1.5 * index,
        "title": f"thing {index % 3} of brand {index % NUM_BRANDS}",
    }


def _user(user: int) -> dict[str, Any]:
    languages = "|".join(["no", "en", "de"][: user % 4])
    return {"user": f"u{user}", "country": ["NO", "SE", ""][user % 3], "age": 20 + user, "languages": languages}


def _events(user: int, draw: random.Random) -> list[dict[str, Any]]:
    brand = user % NUM_BRANDS
    count = 6 + user % 9
    items = [f"i{brand + NUM_BRANDS * draw.randrange(NUM_ITEMS // NUM_BRANDS)}" for _ in range(count)]
    if user % 6 == 0:
        items[-1] = f"n{user // 6 % NUM_NEW}"
    return [
        {
            "user": f"u{user}",
            "item": item,
            "at": _START_MS + 60_000 * (index * NUM_USERS + user),
            "device": draw.choice(["phone", "tv", "web"]),
            "place": draw.choice(["", str(draw.randrange(20))]),
            "query": draw.choice(["red shoe", "", "blue shoe"]),
            "filters": "|".join(f"f{(user + index + k) % 5}" for k in range((user + index) % 4)),
            "clicked": draw.randrange(2),
            "bought": int(draw.random() < 0.2),
        }
        for index, item in enumerate(items)
    ]


def _options(folder: Path) -> dict[str, Any]:
    return {
        "log": {
            "time": "at",
            "time_unit": "ms",
            "actions": {"click": "clicked", "buy": "bought"},
            "categories": ("device",),
            "numbers": ("place",),
            "transforms": {"place": "standard"},
            "texts": ("query",),
            "lists": ("filters",),
            "list_separator": "|",
        },
        "items": str(folder / "items.csv"),
        "item_columns": {
            "categories": ("brand",),
            "lists": ("tags",),
            "list_separator": "|",
            "numbers": ("price",),
            "transforms": {"price": "log"},
            "texts": ("title",),
        },
        "item_vectors": {"picture": f"{folder / 'pictures.npy'}:{folder / 'ids.txt'}"},
        "user_vectors": {"taste": f"{folder / 'tastes.npy'}:{folder / 'user_ids.txt'}"},
        "users": str(folder / "users.csv"),
        "user_columns": {
            "categories": ("country",),
            "numbers": ("age",),
            "transforms": {"age": "standard"},
            "lists": ("languages",),
            "list_separator": "|",
        },
    }


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
