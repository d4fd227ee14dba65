"""Comparison of ways to keep a model fresh, for `nestrec bench fresh`.

Every way predicts a time window before it trains on any of its events. `frozen` is trained on the first part only;
`anew` is trained from scratch on all events before the window; `followed` is trained continuously: after predicting a
window, it trains once on that window.
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

from nestrec.api import create_topology, resolve_config
from nestrec.base.config import config
from nestrec.base.config_values import Count, Decay, Positive, format_iso_time
from nestrec.base.errors import UserError
from nestrec.data.samples.time_windows import TimeWindow
from nestrec.tasks.metrics import ConfidenceInterval, bootstrap
from nestrec.training.trainer import Trainer

Row = dict[str, Any]
WAYS = ("frozen", "anew", "followed")


def summary(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the mean over seeds per window and way, then one row per way over all windows except the first.

    In the first window, all ways are equal. The row of a way contains its mean, its lead over the frozen model, and the
    number of events that it was trained on. If there is only one window, these rows are omitted.
    """
    found = sorted(rows, key=lambda row: (row["window"], WAYS.index(row["way"]), row["seed"]))
    seeds = {row["seed"] for row in found}
    for (window, way), group in groupby(found, key=lambda row: (row["window"], row["way"])):
        window_rows = list(group)
        means = {
            name: float(np.mean([row[name] for row in window_rows])) for name in ("value", "low", "high", "train_s")
        }
        same = {name: window_rows[0][name] for name in ("recipe", "replay_share", "metric", "from", "events")}
        yield {"what": "quality_of_window", **same, "way": way, "window": window, "seeds": len(window_rows), **means}
    for way in WAYS if any(row["window"] > 0 for row in found) else ():
        yield _way_summary(found, way, len(seeds))


def _way_summary(rows: list[Row], way: str, num_seeds: int) -> Row:
    later = {(row["way"], row["seed"], row["window"]): row["value"] for row in rows if row["window"] > 0}
    pairs = [(later[way, *at], later["frozen", *at]) for name, *at in later if name == way]
    values, frozen = np.array(pairs).reshape(-1, 2).T
    ahead = bootstrap({"ahead": values - frozen})["ahead"]
    own = [row for row in rows if row["way"] == way]
    # Continuous training starts from the frozen model, so the training of that model counts too.
    first = [row for row in rows if row["way"] == "frozen" and way == "followed"]
    totals = {name: sum(row[name] for row in (*own, *first)) / num_seeds for name in ("train_s", "events_trained")}
    return {
        "what": "quality_in_all",
        **{name: own[0][name] for name in ("recipe", "replay_share", "metric")},
        **{"way": way, "windows": len(pairs) // num_seeds, "seeds": num_seeds, "value": float(values.mean())},
        **{"ahead": ahead.mean, "ahead_low": ahead.low, "ahead_high": ahead.high, **totals},
    }


_NEVER = "2199-12-31"
"""Start of the validation and test sets if no events are held out."""


@config
class FreshComparison:
    recipe: str = "kuairand_ranking"
    """Recipe to train."""
    folder: str | None = None
    """Folder of the prepared data. None: that of the recipe."""
    hours: Positive = 24.0
    """Duration of a window in hours."""
    start: str = "2022-04-26T16:00+00:00"
    """End of the first part."""
    epochs: Count = 5
    """Number of epochs of training on the first part, and of retraining."""
    replay_share: Decay = 0.2
    """Fraction of replayed events in continuous training."""
    seeds: tuple[int, ...] = (1, 2)
    """Seeds with which each way is trained."""
    metric: str = "auc/click"
    """Metric to compare."""
    at_once: Count = 1
    """Number of seeds to train at the same time, each in its own process."""
    options: tuple[str, ...] = ()
    """Options of all runs, as OPTION=VALUE."""


def compare(bench: FreshComparison, folder: Path) -> Iterator[Row]:
    """Yield the rows of all seeds as they are measured, then their summary."""
    if not bench.seeds:
        raise UserError("at least one seed is required", option="seeds", value=(), remedy="set --seeds 1,2")
    rows: list[Row] = []
    for row in _train_in_turn(bench, folder) if bench.at_once == 1 else _train_in_parallel(bench, folder):
        rows.append(row)
        yield row
    if all(row["window"] == 0 for row in rows):
        problem = "all ways are equal in the first window, and there is no second one to compare"
        remedy = "set an earlier start, or shorter windows (--hours)"
        raise UserError(problem, option="start", value=bench.start, remedy=remedy)
    yield from summary(rows)


def _train_in_turn(bench: FreshComparison, folder: Path) -> Iterator[Row]:
    for seed in bench.seeds:
        yield from SeedComparison(bench, seed, folder / str(seed)).rows()


def _train_in_parallel(bench: FreshComparison, folder: Path) -> Iterator[Row]:
    for first in range(0, len(bench.seeds), bench.at_once):
        seeds = bench.seeds[first : first + bench.at_once]
        processes = [_SeedProcess(bench, seed, folder) for seed in seeds]
        running = [process.rows for process in processes]
        while running:
            for rows in wait(running):
                assert isinstance(rows, Connection)
                try:
                    yield rows.recv()
                except EOFError:  # the process has ended or failed
                    running.remove(rows)
        for process in processes:
            process.check()


class _SeedProcess:
    """A process that trains one seed and sends its rows as they are measured."""

    def __init__(self, bench: FreshComparison, seed: int, folder: Path):
        context = multiprocessing.get_context("spawn")
        self._seed = seed
        self.rows, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_send_rows, args=(bench, seed, folder, sender))
        self._process.start()
        sender.close()  # this process's copy, so that the pipe closes when the other process ends

    def check(self) -> None:
        self._process.join()
        if self._process.exitcode:
            raise RuntimeError(f"the process that trains with seed {self._seed} ended with {self._process.exitcode}")


def _send_rows(bench: FreshComparison, seed: int, folder: Path, sender: "Connection[Row, None]") -> None:
    for row in SeedComparison(bench, seed, folder / str(seed)).rows():
        sender.send(row)


class SeedComparison:
    """Comparison of the three ways with one seed."""

    def __init__(self, bench: FreshComparison, seed: int, folder: Path):
        self._bench = bench
        self._seed = seed
        self._folder = folder
        self._windows: list[TimeWindow] = []
        self._num_events = 0

    def rows(self) -> Iterator[Row]:
        start = self._bench.start
        first_s = self._train("first", start, None)[1]
        in_time = {"batch.order": "chronological", "windows.hours": self._bench.hours, "windows.start_time": start}
        in_time |= {"windows.replay_fraction": self._bench.replay_share, "training.epochs": 1, **self._until(_NEVER)}
        with closing(self._trainer("frozen", in_time, self._folder / "first")) as frozen:
            frozen._begin()
            self._windows = frozen.windows
            self._num_events = frozen.session.dataset.card.counts.events
            for window in frozen.windows:
                found = frozen.session.task.evaluate_window(frozen.session.engine, window)
                is_first = window.number == 0
                trained = is_first * self._events_to_retrain(window)
                yield self._row("frozen", window, found, first_s * is_first, trained)
            frozen.schedule.close()
        yield from self._train_continuously(in_time)
        for window in self._windows:
            found, train_s = self._train(f"anew-{window.number}", format_iso_time(window.from_ms), window)
            yield self._row("anew", window, found, train_s, self._events_to_retrain(window))

    def _train_continuously(self, in_time: dict[str, object]) -> Iterator[Row]:
        ended_s: list[float] = []
        predicted: list[tuple[TimeWindow, dict[str, ConfidenceInterval], float]] = []
        with closing(self._trainer("followed", in_time, self._folder / "first")) as trainer:
            predict = trainer.session.task.evaluate_window

            def timed(engine: object, window: TimeWindow) -> dict[str, ConfidenceInterval]:
                start_s = time.perf_counter()
                found = predict(engine, window)  # type: ignore[arg-type]
                predicted.append((window, found, time.perf_counter() - start_s))
                return found

            trainer.session.task.evaluate_window = timed  # type: ignore[method-assign]
            trainer._window_hooks = [lambda end: ended_s.append(time.perf_counter())]
            since_s = time.perf_counter()
            trainer.train()
        for (window, found, predict_s), end_s in zip(predicted, ended_s, strict=True):
            trained = round(window.num_events / (1 - self._bench.replay_share))
            yield self._row("followed", window, found, end_s - since_s - predict_s, trained)
            since_s = end_s

    def _events_to_retrain(self, window: TimeWindow) -> int:
        """Return the number of events on which retraining before a window trains, over all epochs."""
        later = sum(other.num_events for other in self._windows if other.number >= window.number)
        return self._bench.epochs * (self._num_events - later)

    def _train(self, name: str, until: str, window: TimeWindow | None) -> tuple[dict[str, ConfidenceInterval], float]:
        """Train from scratch on the events before `until`; return the metrics of a window and the training seconds."""
        more = {**self._until(until), "training.epochs": self._bench.epochs}
        with closing(self._trainer(name, more, None)) as trainer:
            start_s = time.perf_counter()
            trainer.train()
            train_s = time.perf_counter() - start_s
            task = trainer.session.task
            engine = trainer.session.engine
            return {} if window is None else task.evaluate_window(engine, window), train_s

    def _trainer(self, name: str, more: dict[str, object], start_from: Path | None) -> Trainer:
        folder = {} if self._bench.folder is None else {"data.folder": self._bench.folder}
        options = dict(option.partition("=")[::2] for option in self._bench.options)
        fixed = {"training.seed": self._seed, "training.eval_every_epochs": 0, "training.early_stopping_patience": None}
        cfg = resolve_config(self._bench.recipe, {**fixed, "task.split.kind": "time", **folder, **options, **more})
        return Trainer(cfg, self._folder / name, create_topology(cfg, cfg.parallel), warm_start=start_from)

    def _until(self, moment: str) -> dict[str, object]:
        return {"task.split.valid_from": moment, "task.split.test_from": moment}

    def _row(
        self, way: str, window: TimeWindow, found: dict[str, ConfidenceInterval], train_s: float, trained: int
    ) -> Row:
        value = found[self._bench.metric]
        return {
            **{"what": "quality", "recipe": self._bench.recipe, "replay_share": self._bench.replay_share},
            **{"way": way, "seed": self._seed},
            **{"window": window.number, "from": format_iso_time(window.from_ms), "events": window.num_events},
            **{"metric": self._bench.metric, "value": value.mean, "low": value.low, "high": value.high},
            **{"train_s": train_s, "events_trained": trained, "metrics": {name: v.mean for name, v in found.items()}},
        }
