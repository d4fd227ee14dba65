"""Lengths of a jagged batch for benchmarks, by name or as anyone's own data has them.

    u1024, u8192x32                            so long each, as many as make up the tokens (131,072) or as are said
    logn, shortvid, kuai1k                     lognormal, with the count, the largest length and the mean or median
                                               that the name stands for
    lognormal:mean=900,max=8192,count=200      the same of one's own; deviation=1 is that of the logarithm
    lengths.txt                                a file of whole numbers
    data/ml-1m, data/ml-1m:max=200             a prepared dataset: histories of users by chance, until there are so
                                               many tokens; max cuts them, as it does those of a file

Lognormal lengths are quantiles, so a shape is the same everywhere, and stand in a shuffled order, as a batch would.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from nestrec.base.errors import UserError, did_you_mean, require
from nestrec.data.dataset import Dataset

TOKENS = 131_072
_LOGNORMAL = {"logn": (224, 1.0, 4096), "shortvid": (480, 1.15, 2048), "kuai1k": (32, 0.95, 14_704)}
"""sequences, standard deviation of the logarithm, longest"""
LENGTH_SHAPES = ("u1024", "u4096", *_LOGNORMAL)


def lengths_of(name: str, tokens: int = TOKENS) -> NDArray[np.int64]:
    """Lengths of the sequences of a shape; other token counts scale the number of sequences of those with a name."""
    if uniform := re.fullmatch(r"u(\d+)(?:x(\d+))?", name):
        length, count = (int(n) if n else 0 for n in uniform.groups())
        return np.full(count or max(1, tokens // max(length, 1)), _at_least_one(name, length), np.int64)
    if name in _LOGNORMAL:
        count, deviation, longest = _LOGNORMAL[name]
        return _lognormal(max(1, round(count * tokens / TOKENS)), deviation, longest, tokens)
    kind, _, text = name.partition(":")
    if kind == "lognormal":
        given = _numbers(name, text, {"mean": None, "max": None, "count": None, "deviation": 1.0})
        count = _at_least_one(name, int(given["count"]))
        mean = min(given["mean"], given["max"])
        longest = int(given["max"])
        return _lognormal(count, given["deviation"], longest, _at_least_one(name, round(mean * count)))
    if not Path(kind).exists():
        remedy = (
            f"{did_you_mean(kind, LENGTH_SHAPES)}; or uN, lognormal:mean=...,max=...,count=..., a file or a dataset"
        )
        raise UserError("no such length shape", option="lengths", value=name, remedy=remedy)
    most = _numbers(name, text, {"max": np.iinfo(np.int64).max})["max"]
    found = _of_dataset(Path(kind), tokens, int(most)) if Path(kind).is_dir() else _of_file(Path(kind))
    return np.minimum(found, int(most)).astype(np.int64)


def whole_shapes(parts: Iterable[str]) -> list[str]:
    """Shapes from a list that was cut at commas: `lognormal:mean=9`, `max=20` belong together."""
    found = list[str]()
    for part in parts:
        if found and re.fullmatch(r"\w+=[^:]*", part):
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def _lognormal(count: int, deviation: float, longest: int, tokens: int) -> NDArray[np.int64]:
    normal = NormalDist()
    spread = np.exp(deviation * np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)]))
    return np.random.default_rng(0).permutation(_scaled(spread, tokens, longest))


def _scaled(spread: NDArray[np.float64], tokens: int, longest: int) -> NDArray[np.int64]:
    """Lengths in proportion to `spread`, at most `longest`, that sum to `tokens`."""
    low = 0.0
    high = float(tokens)
    for _ in range(64):
        middle = (low + high) / 2
        total = np.clip(np.round(spread * middle), 1, longest).sum()
        low, high = (middle, high) if total < tokens else (low, middle)
    lengths = np.clip(np.round(spread * low), 1, longest).astype(np.int64)
    short = tokens - int(lengths.sum())
    lengths[np.argsort(lengths, kind="stable")[: abs(short)]] += np.sign(short)
    return lengths


def _of_file(path: Path) -> NDArray[np.int64]:
    try:
        found = np.array(path.read_text().replace(",", " ").split(), np.int64)
    except (ValueError, UnicodeDecodeError):
        found = np.zeros(0, np.int64)
    if not len(found) or found.min() < 1:
        raise UserError("is no file of lengths", option="lengths", value=str(path), remedy="write whole numbers from 1")
    return found


def _of_dataset(folder: Path, tokens: int, most: int) -> NDArray[np.int64]:
    """Of users by chance, at least one."""
    lengths = np.random.default_rng(0).permutation(Dataset.open(folder, columns=[]).lengths.astype(np.int64))
    total = np.minimum(lengths, most).cumsum()
    return lengths[: max(1, int(np.searchsorted(total, tokens, side="right")))]


def _numbers(name: str, text: str, defaults: dict[str, float | None]) -> dict[str, float]:
    """`a=1,b=2` with every name known and every value without a default given."""
    given = dict(part.partition("=")[::2] for part in text.split(",") if part)
    try:
        found = defaults | {key: float(value) for key, value in given.items()}
    except ValueError:
        found = {}
    whole = {key: value for key, value in found.items() if value is not None}
    if set(whole) != set(defaults):
        form = ",".join(f"{key}={'N' if value is None else value}" for key, value in defaults.items())
        raise UserError("is no shape", option="lengths", value=name, remedy=f"write {name.partition(':')[0]}:{form}")
    return whole


def _at_least_one(name: str, number: int) -> int:
    require(number >= 1, "has no tokens", option="lengths", value=name, remedy="give lengths and counts of at least 1")
    return number
