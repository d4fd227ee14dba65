"""Sequence lengths of a jagged batch for benchmarks: named shapes, distributions, files and datasets.

    u1024, u8192x32                            uniform: sequences of 1,024 tokens that add up to the number of tokens
                                               (131,072), or 32 sequences of 8,192 tokens
    logn, shortvid, kuai1k                     named lognormal shapes, each with a number of sequences, a standard
                                               deviation and a maximum length
    lognormal:mean=900,max=8192,count=200      custom lognormal shape; the standard deviation of the logarithm is 1, or
                                               the value of deviation=
    lengths.txt                                file of integers; lengths.txt:max=200 truncates them
    data/ml-1m, data/ml-1m:max=200             prepared dataset: histories of random users up to the number of tokens,
                                               optionally truncated

Lognormal lengths are quantiles in a random but fixed order, so that a shape is always the same.
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
"""Name to the number of sequences, the standard deviation of the logarithm, and the maximum length."""
LENGTH_SHAPES = ("u1024", "u4096", *_LOGNORMAL)


def lengths_of(name: str, tokens: int = TOKENS) -> NDArray[np.int64]:
    """Return the lengths of the sequences of a shape.

    Args:
        name: Name of the shape, as described at the top of this module.
        tokens: Number of tokens, by which the number of sequences of named shapes is scaled.
    """
    if uniform := re.fullmatch(r"u(\d+)(?:x(\d+))?", name):
        length, count = (int(n) if n else 0 for n in uniform.groups())
        return np.full(count or max(1, tokens // max(length, 1)), _at_least_one(name, length), np.int64)
    if name in _LOGNORMAL:
        count, deviation, longest = _LOGNORMAL[name]
        return _lognormal(max(1, round(count * tokens / TOKENS)), deviation, longest, tokens)
    kind, _, text = name.partition(":")
    if kind == "lognormal":
        numbers = _numbers(name, text, {"mean": None, "max": None, "count": None, "deviation": 1.0})
        count = _at_least_one(name, int(numbers["count"]))
        mean = min(numbers["mean"], numbers["max"])
        longest = int(numbers["max"])
        return _lognormal(count, numbers["deviation"], longest, _at_least_one(name, round(mean * count)))
    if not Path(kind).exists():
        remedy = (
            f"{did_you_mean(kind, LENGTH_SHAPES)} Other shapes are uN, lognormal:mean=...,max=...,count=..., files and "
            "datasets"
        )
        raise UserError("no such length shape", option="lengths", value=name, remedy=remedy)
    longest = int(_numbers(name, text, {"max": np.iinfo(np.int64).max})["max"])
    found = _of_dataset(Path(kind), tokens, longest) if Path(kind).is_dir() else _of_file(Path(kind))
    return np.minimum(found, longest).astype(np.int64)


def join_shapes(parts: Iterable[str]) -> list[str]:
    """Return the shapes of a list that was split at commas: `lognormal:mean=9` and `max=20` are joined again."""
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
    """Return lengths in proportion to `spread`, at most `longest`, that sum to `tokens`."""
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
        problem = "the file does not contain valid lengths"
        raise UserError(problem, option="lengths", value=str(path), remedy="write only integers of at least 1")
    return found


def _of_dataset(folder: Path, tokens: int, longest: int) -> NDArray[np.int64]:
    """Return the history lengths of random users, at least one, that sum to at most `tokens`."""
    lengths = np.random.default_rng(0).permutation(Dataset.open(folder, columns=[]).lengths.astype(np.int64))
    total = np.minimum(lengths, longest).cumsum()
    return lengths[: max(1, int(np.searchsorted(total, tokens, side="right")))]


def _numbers(name: str, text: str, defaults: dict[str, float | None]) -> dict[str, float]:
    """Parse `a=1,b=2`. Every name must be known, and names with the default None must be set."""
    values = dict(part.partition("=")[::2] for part in text.split(",") if part)
    try:
        found = defaults | {key: float(value) for key, value in values.items()}
    except ValueError:
        found = {}
    numbers = {key: value for key, value in found.items() if value is not None}
    if set(numbers) != set(defaults):
        form = ",".join(f"{key}={'N' if value is None else value}" for key, value in defaults.items())
        remedy = f"write {name.partition(':')[0]}:{form}"
        raise UserError("the parameters of the shape are invalid", option="lengths", value=name, remedy=remedy)
    return numbers


def _at_least_one(name: str, number: int) -> int:
    remedy = "set lengths and counts to at least 1"
    require(number >= 1, "the shape does not contain tokens", option="lengths", value=name, remedy=remedy)
    return number
