"""Is it worth following? A model frozen after the first part, trained anew for each window of time, and followed.

Every way predicts a window before it has seen any of it. `anew` trains from scratch on all that came before the window;
`followed` trains on the window alone, once, after it was predicted.

What the windows and seeds of a comparison of ways to keep fresh come to: `nestrec bench fresh`.
"""

import multiprocessing
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import groupby
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from nestrec.api import configured, topology_of
from nestrec.base.config import config
from nestrec.base.config_values import Count, Decay, Positive, iso_moment
from nestrec.base.errors import UserError
from nestrec.data.samples.time_windows import TimeWindow
from nestrec.tasks.metrics import ConfidenceInterval, bootstrap
from nestrec.training.trainer import Trainer

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


_NEVER = "2199-12-31"
"""Nothing is held out from this date on."""


@config
class FreshComparison:
    recipe: str = "kuairand_ranking"
    """what is trained"""
    folder: str | None = None
    """its prepared data; none: where the recipe looks for it"""
    hours: Positive = 24.0
    """of a window"""
    start: str = "2022-04-26T16:00+00:00"
    """end of the first part"""
    epochs: Count = 5
    """of the first part, and of what is trained anew"""
    replay_share: Decay = 0.2
    """of what is followed"""
    seeds: tuple[int, ...] = (1, 2)
    """each way is trained with each"""
    metric: str = "auc/click"
    """what is compared"""
    at_once: Count = 1
    """seeds that are trained at the same time, each in a process of its own"""
    options: tuple[str, ...] = ()
    """OPTION=VALUE of all runs"""


def compared(bench: FreshComparison, folder: Path) -> Iterator[Row]:
    """Rows of all seeds as they come, then what they come to."""
    if not bench.seeds:
        raise UserError(
            "names none: nothing would be trained", option="seeds", value=(), remedy="give some: --seeds 1,2"
        )
    rows: list[Row] = []
    for row in _in_turn(bench, folder) if bench.at_once == 1 else _side_by_side(bench, folder):
        rows.append(row)
        yield row
    if all(row["window"] == 0 for row in rows):
        remedy = "begin earlier, or take shorter windows (--hours): all ways are alike in the first one"
        raise UserError("leaves no second window to compare", option="start", value=bench.start, remedy=remedy)
    yield from summary(rows)


def _in_turn(bench: FreshComparison, folder: Path) -> Iterator[Row]:
    for seed in bench.seeds:
        yield from WaysToKeepFresh(bench, seed, folder / str(seed)).rows()


def _side_by_side(bench: FreshComparison, folder: Path) -> Iterator[Row]:
    for first in range(0, len(bench.seeds), bench.at_once):
        seeds = bench.seeds[first : first + bench.at_once]
        processes = [_Telling(bench, seed, folder) for seed in seeds]
        telling = [process.rows for process in processes]
        while telling:
            for rows in wait(telling):
                assert isinstance(rows, Connection)
                try:
                    yield rows.recv()
                except EOFError:  # it has ended, in whatever way
                    telling.remove(rows)
        for process in processes:
            process.check()


class _Telling:
    """A process that trains one seed, and tells its rows as they come."""

    def __init__(self, bench: FreshComparison, seed: int, folder: Path):
        context = multiprocessing.get_context("spawn")
        self._seed = seed
        self.rows, told = context.Pipe(duplex=False)
        self._process = context.Process(target=_tell, args=(bench, seed, folder, told))
        self._process.start()
        told.close()  # ours, so that its end is that of the process

    def check(self) -> None:
        self._process.join()
        if self._process.exitcode:
            raise RuntimeError(f"the process that trains with seed {self._seed} ended with {self._process.exitcode}")


def _tell(bench: FreshComparison, seed: int, folder: Path, told: "Connection[Row, None]") -> None:
    for row in WaysToKeepFresh(bench, seed, folder / str(seed)).rows():
        told.send(row)


class WaysToKeepFresh:
    """The three ways with one seed."""

    def __init__(self, bench: FreshComparison, seed: int, folder: Path):
        self._bench = bench
        self._seed = seed
        self._folder = folder
        self._windows: list[TimeWindow] = []
        self._num_events = 0

    def rows(self) -> Iterator[Row]:
        start = self._bench.start
        first_s = self._train("first", start, None)[1]
        in_time = {"batch.order": "chronological", "windows.hours": self._bench.hours, "windows.start": start}
        in_time |= {"windows.replay_share": self._bench.replay_share, "training.epochs": 1, **self._until(_NEVER)}
        with closing(self._trainer("frozen", in_time, self._folder / "first")) as frozen:
            frozen._begin()
            self._windows = frozen.windows
            self._num_events = frozen.session.dataset.card.counts.events
            for window in frozen.windows:
                found = frozen.session.task.predict(frozen.session.engine, window)
                is_first = window.number == 0
                yield self._row("frozen", window, found, first_s * is_first, is_first * self._anew(window))
            frozen.schedule.close()
        yield from self._followed(in_time)
        for window in self._windows:
            found, took_s = self._train(f"anew-{window.number}", iso_moment(window.from_ms), window)
            yield self._row("anew", window, found, took_s, self._anew(window))

    def _followed(self, in_time: dict[str, object]) -> Iterator[Row]:
        ended_s: list[float] = []
        predicted: list[tuple[TimeWindow, dict[str, ConfidenceInterval], float]] = []
        with closing(self._trainer("followed", in_time, self._folder / "first")) as trainer:
            predict = trainer.session.task.predict

            def timed(engine: object, window: TimeWindow) -> dict[str, ConfidenceInterval]:
                began_s = time.perf_counter()
                found = predict(engine, window)  # type: ignore[arg-type]
                predicted.append((window, found, time.perf_counter() - began_s))
                return found

            trainer.session.task.predict = timed  # type: ignore[method-assign]
            trainer._window_hooks = [lambda end: ended_s.append(time.perf_counter())]
            since_s = time.perf_counter()
            trainer.train()
        for (window, found, predict_s), end_s in zip(predicted, ended_s, strict=True):
            trained = round(window.num_events / (1 - self._bench.replay_share))
            yield self._row("followed", window, found, end_s - since_s - predict_s, trained)
            since_s = end_s

    def _anew(self, window: TimeWindow) -> int:
        """Events that all epochs of what came before a window train on."""
        later = sum(other.num_events for other in self._windows if other.number >= window.number)
        return self._bench.epochs * (self._num_events - later)

    def _train(self, name: str, until: str, window: TimeWindow | None) -> tuple[dict[str, ConfidenceInterval], float]:
        """Train from scratch on what came before, then predict a window; the seconds of training."""
        more = {**self._until(until), "training.epochs": self._bench.epochs}
        with closing(self._trainer(name, more, None)) as trainer:
            began_s = time.perf_counter()
            trainer.train()
            took_s = time.perf_counter() - began_s
            task = trainer.session.task
            engine = trainer.session.engine
            return {} if window is None else task.predict(engine, window), took_s

    def _trainer(self, name: str, more: dict[str, object], start_from: Path | None) -> Trainer:
        folder = {} if self._bench.folder is None else {"data.folder": self._bench.folder}
        given = dict(option.partition("=")[::2] for option in self._bench.options)
        fixed = {"training.seed": self._seed, "training.evaluate_every_epochs": 0, "training.patience": None}
        cfg = configured(self._bench.recipe, {**fixed, "task.split.kind": "time", **folder, **given, **more})
        return Trainer(cfg, self._folder / name, topology_of(cfg, cfg.ranks), start_from=start_from)

    def _until(self, moment: str) -> dict[str, object]:
        return {"task.split.valid_from": moment, "task.split.test_from": moment}

    def _row(
        self, way: str, window: TimeWindow, found: dict[str, ConfidenceInterval], took_s: float, trained: int
    ) -> Row:
        value = found[self._bench.metric]
        return {
            **{"what": "quality", "recipe": self._bench.recipe, "replay_share": self._bench.replay_share},
            **{"way": way, "seed": self._seed},
            **{"window": window.number, "from": iso_moment(window.from_ms), "events": window.num_events},
            **{"metric": self._bench.metric, "value": value.mean, "low": value.low, "high": value.high},
            **{"train_s": took_s, "events_trained": trained, "metrics": {name: v.mean for name, v in found.items()}},
        }
