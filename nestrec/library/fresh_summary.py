"""What the windows and seeds of a comparison of ways to keep fresh come to: `nestrec bench fresh`."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import numpy as np

from nestrec.tasks.metrics import bootstrap

Row = dict[str, Any]
WAYS = ("frozen", "anew", "followed")


def summary(rows: Iterable[Row]) -> Iterator[Row]:
    """Of each window the mean over seeds of each way; then of each way the mean over all windows but the first, where
    all are alike, how far it is ahead of the frozen model, and what it has trained on. Of nothing beyond the first
    window nothing in all is said."""
    found = sorted(rows, key=lambda row: (row["window"], WAYS.index(row["way"]), row["seed"]))
    seeds = {row["seed"] for row in found}
    for (window, way), group in groupby(found, key=lambda row: (row["window"], row["way"])):
        of_window = list(group)
        means = {name: float(np.mean([row[name] for row in of_window])) for name in ("value", "low", "high", "train_s")}
        same = {name: of_window[0][name] for name in ("recipe", "replay_share", "metric", "from", "events")}
        yield {"what": "quality_of_window", **same, "way": way, "window": window, "seeds": len(of_window), **means}
    for way in WAYS if any(row["window"] > 0 for row in found) else ():
        yield _of_way(found, way, len(seeds))


def _of_way(rows: list[Row], way: str, num_seeds: int) -> Row:
    later = {(row["way"], row["seed"], row["window"]): row["value"] for row in rows if row["window"] > 0}
    pairs = [(later[way, *at], later["frozen", *at]) for name, *at in later if name == way]
    values, frozen = np.array(pairs).reshape(-1, 2).T
    ahead = bootstrap({"ahead": values - frozen})["ahead"]
    mine = [row for row in rows if row["way"] == way]
    first = [row for row in rows if row["way"] == "frozen" and way == "followed"]  # it begins with what that has learnt
    totals = {name: sum(row[name] for row in (*mine, *first)) / num_seeds for name in ("train_s", "events_trained")}
    return {
        "what": "quality_in_all",
        **{name: mine[0][name] for name in ("recipe", "replay_share", "metric")},
        **{"way": way, "windows": len(pairs) // num_seeds, "seeds": num_seeds, "value": float(values.mean())},
        **{"ahead": ahead.mean, "ahead_low": ahead.low, "ahead_high": ahead.high, **totals},
    }
