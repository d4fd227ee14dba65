"""Hyperparameter search with Optuna under a budget of trials or minutes (`nestrec tune`); a search can be resumed.

    folder/study.log         Optuna journal of all trials; several processes can share it
    folder/run-DIGEST        run folder of a trial, named by a digest of its options: an interrupted trial resumes in it
    folder/best.json         best options so far
    folder/search.json       settings that all trials share; a search is resumed only with the same settings

Each trial is a separate process (`nestrec train`, with several ranks `nestrec launch`). Its score is the best
validation score of the run.
"""

import json
import math
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from nestrec.base.clock import Clock, RealClock
from nestrec.base.config import standard_json
from nestrec.base.errors import INTERRUPTED, ErrorCollector, UserError, require
from nestrec.base.lazy import import_extra
from nestrec.data.dataset_card import CARD_FILE, DatasetCard
from nestrec.report.formatting import mean_of_metric
from nestrec.report.run_records import best_evaluation, load_run

Overrides = Mapping[str, str]
Measure = Callable[[Overrides, Path, float | None], float]
"""Maps (options, run folder, remaining seconds or None) to the best validation score; NaN if there is none."""
_MAX_FAILED, _MAX_FAILED_AT_START = 10, 3
"""Number of consecutive trials without a score that ends a search; the second applies until a trial has a score."""
BEST_FILE, STUDY_FILE, LOG_FILE, SEARCH_FILE = "best.json", "study.log", "train.log", "search.json"
DEFAULT_SEARCH: dict[str, str] = {
    "optimizer.learning_rate": "3e-4..1e-2",
    "task.encoder.dropout": "0.1..0.6",
    "task.encoder.num_layers": "1..4",
}
"""Options that are searched by default, with their ranges."""


@dataclass(frozen=True, slots=True)
class Range:
    """Range of numbers, ends included; sampled on a logarithmic scale if it spans a factor of ten."""

    low: float
    high: float
    is_integer: bool

    def suggest(self, trial: Any, option: str) -> str:
        is_log = self.low > 0 and self.high / self.low >= 10
        if self.is_integer:
            return str(trial.suggest_int(option, int(self.low), int(self.high), log=is_log))
        return f"{trial.suggest_float(option, self.low, self.high, log=is_log):.6g}"

    @property
    def first(self) -> str:
        """The lower bound, as it is typed on the command line."""
        return str(int(self.low)) if self.is_integer else f"{self.low:.6g}"

    def to_plain(self) -> str:
        """Return what a resumed search must not change: the type, but not the bounds."""
        return "a range of whole numbers" if self.is_integer else "a range"  # stored in search.json


@dataclass(frozen=True, slots=True)
class Choices:
    """List of values to choose from, as they are typed on the command line."""

    values: tuple[str, ...]

    def suggest(self, trial: Any, option: str) -> str:
        return str(trial.suggest_categorical(option, list(self.values)))

    @property
    def first(self) -> str:
        """The first value."""
        return self.values[0]

    def to_plain(self) -> str:
        """Return what a resumed search must not change: the values."""
        return ",".join(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Best trial of a search."""

    overrides: dict[str, str]
    """Options of the best trial, as typed on the command line."""
    score: float
    """Best validation score; NaN if no trial has a score."""
    num_trials: int
    """Number of trials with a score, including those before the search was resumed."""
    folder: Path
    """Run folder of the best trial."""


def parse_search(texts: Sequence[str]) -> dict[str, Range | Choices]:
    """Parse the values of `--search`: `option=low..high` or `option=a,b,c`; `DEFAULT_SEARCH` if there are none.

    Raises:
        UserError: A text is malformed, or an option occurs twice.
    """
    search: dict[str, Range | Choices] = {}
    for text in texts or [f"{option}={values}" for option, values in DEFAULT_SEARCH.items()]:
        option, sign, values = text.partition("=")
        if not sign or not values or option in search:
            remedy = (
                "write option=low..high or option=a,b,c, each option once, such as optimizer.learning_rate=1e-4..1e-2"
            )
            raise UserError("missing search range, or repeated option", option="--search", value=text, remedy=remedy)
        search[option] = _parse_range(text, values) if ".." in values else Choices(tuple(values.split(",")))
    return search


def _parse_range(text: str, bounds_text: str) -> Range:
    low, _, high = bounds_text.partition("..")
    try:
        bounds = float(low), float(high)
    except ValueError:
        bounds = math.nan, math.nan
    remedy = "write two numbers, the smaller one first, such as 1e-4..1e-2"
    require(bounds[0] < bounds[1], "invalid search range", option="--search", value=text, remedy=remedy)
    return Range(*bounds, is_integer=low.strip("-").isdigit() and high.isdigit())


def tune(
    folder: Path,
    search: Mapping[str, Range | Choices],
    measure: Measure,
    *,
    num_trials: int | None,
    minutes: float | None,
    shared: Mapping[str, str] | None = None,
    seed: int = 0,
    clock: Clock | None = None,
    report: Callable[[str], None] = print,
) -> SearchResult:
    """Run trials until `num_trials` have a score, until `minutes` have passed, or until too many fail in a row.

    Args:
        folder: Folder of the search; if it contains a search already, that search is resumed.
        search: Maps the dotted options to search to their ranges or choices.
        measure: Runs one trial and returns its score.
        num_trials: Total number of trials with a score, over all starts; None for no limit.
        minutes: Time limit of this start; None for no limit.
        shared: Settings that all trials have in common, such as the recipe, by name. A resumed search must have the
            same settings, because scores would not be comparable otherwise.
        seed: Seed of the sampler.
        clock: Source of time; the real clock by default.
        report: Receives one line per trial.

    Returns:
        The best trial of all starts.

    Raises:
        UserError: No limit was set, the folder holds another search, or no trial has a score.
    """
    if num_trials is None and minutes is None:
        remedy = "set --num-trials 20, --time-budget-min 60, or both"
        raise UserError("a search needs a limit", option="--num-trials", value=None, remedy=remedy)
    optuna = _optuna()
    journal = optuna.storages.journal
    folder.mkdir(parents=True, exist_ok=True)
    _check_same_search(
        folder, {**(shared or {}), **{f"--search {option}": values.to_plain() for option, values in search.items()}}
    )
    study = optuna.create_study(
        storage=journal.JournalStorage(journal.JournalFileBackend(str(folder / STUDY_FILE))),
        study_name="tune",
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=min(10, num_trials or 10)),
        load_if_exists=True,
    )
    _requeue_unfinished(study, optuna)
    clock = clock or RealClock()
    end_s = None if minutes is None else clock.now_s() + 60 * minutes
    num_failed = 0
    while (num_trials is None or _num_scored(study) < num_trials) and (end_s is None or clock.now_s() < end_s):
        trial = study.ask()
        overrides = {option: values.suggest(trial, option) for option, values in search.items()}
        run = folder / run_name(overrides)
        score = measure(overrides, run, None if end_s is None else end_s - clock.now_s())
        num_failed = 0 if math.isfinite(score) else num_failed + 1
        is_over = end_s is not None and clock.now_s() >= end_s
        if math.isfinite(score):
            study.tell(trial, score)
        elif not is_over:  # otherwise the trial stays in the state RUNNING, and the next start resumes it
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        outcome = f"{score:.4f}" if math.isfinite(score) else _describe_failure(run, is_over=is_over)
        report(f"trial {trial.number}: {outcome} {json.dumps({'run': run.name, 'overrides': overrides})}")
        _save_best(study, search, folder)
        if num_failed >= (_MAX_FAILED if _num_scored(study) else _MAX_FAILED_AT_START):
            raise UserError(
                f"{num_failed} consecutive trials have no validation score",
                option="tune",
                value=str(folder),
                remedy=f"read the error in {run / LOG_FILE}; after the fix, the same command resumes the search",
            )
    if not _num_scored(study):
        remedy = (
            f"set a longer time, and the same command resumes the search; see {LOG_FILE} in the run folders of {folder}"
        )
        raise UserError("no trial has a validation score yet", option="--time-budget-min", value=minutes, remedy=remedy)
    return _save_best(study, search, folder)


def _describe_failure(run: Path, *, is_over: bool) -> str:
    return "time limit reached before the first validation" if is_over else f"no score (see {run / LOG_FILE})"


def run_name(overrides: Overrides) -> str:
    """Return the folder name of a trial; equal options give the same name, so that an interrupted run resumes."""
    return f"run-{sha256(json.dumps(dict(sorted(overrides.items()))).encode()).hexdigest()[:12]}"


def _check_same_search(folder: Path, settings: Mapping[str, str]) -> None:
    """Raise if the folder contains a search with other settings, whose scores are not comparable."""
    file = folder / SEARCH_FILE
    before: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    mistakes = ErrorCollector()
    for name in dict.fromkeys([*before, *settings] if before else ()):
        may_be_unknown = name == "data" or name.startswith("--search")
        if before.get(name) == settings.get(name) or (may_be_unknown and not (name in before and name in settings)):
            continue
        mistakes.add(
            f"the folder contains a search with a different {name}: {before.get(name, 'none')}",
            option="--output",
            value=str(folder),
            remedy=f"use another folder, or the previous setting (now: {settings.get(name, 'none')})",
        )
    mistakes.raise_if_any()
    file.write_text(standard_json({**before, **settings}, indent=2) + "\n")


def shared_settings(recipe: str, fixed_overrides: Overrides, data: Path) -> dict[str, str]:
    """Return the settings that all trials of a search share: recipe, overrides, and digest of the dataset."""
    digest = {"data": DatasetCard.load(data).digest_of_files} if (data / CARD_FILE).exists() else {}
    return {"recipe": recipe, **{f"--{name}": value for name, value in fixed_overrides.items()}, **digest}


def _requeue_unfinished(study: Any, optuna: Any) -> None:
    """Queue the trials that were running when the search was killed, with the same options, before any new trial."""
    for trial in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        study.enqueue_trial(trial.params)


def _num_scored(study: Any) -> int:
    return sum(trial.value is not None for trial in study.get_trials(deepcopy=False))


def _save_best(study: Any, search: Mapping[str, Range | Choices], folder: Path) -> SearchResult:
    best = max(
        (t for t in study.get_trials(deepcopy=False) if t.value is not None), key=lambda t: t.value, default=None
    )
    if best is None:
        return SearchResult(overrides={}, score=math.nan, num_trials=0, folder=folder)
    overrides = {
        option: values.suggest(_FixedTrial(best.params), option)
        for option, values in search.items()
        if option in best.params
    }
    result = SearchResult(
        overrides=overrides, score=best.value, num_trials=_num_scored(study), folder=folder / run_name(overrides)
    )
    plain = {"score": result.score, "tries": result.num_trials, "overrides": overrides, "run": result.folder.name}
    (folder / BEST_FILE).write_text(standard_json(plain, indent=2) + "\n")
    return result


@dataclass(frozen=True, slots=True)
class _FixedTrial:
    """Trial with known parameters, so that `suggest` formats them as it did when the trial ran."""

    params: Mapping[str, Any]

    def suggest_int(self, option: str, *_: Any, **__: Any) -> int:
        return int(self.params[option])

    def suggest_float(self, option: str, *_: Any, **__: Any) -> float:
        return float(self.params[option])

    def suggest_categorical(self, option: str, *_: Any) -> str:
        return str(self.params[option])


def train_command(
    recipe: str, fixed_overrides: Overrides, overrides: Overrides, run: Path, num_ranks: int
) -> list[str]:
    """Return the command line that runs one trial."""
    options = [part for name, value in {**fixed_overrides, **overrides}.items() for part in (f"--{name}", value)]
    launch = ["launch", "-n", str(num_ranks)] if num_ranks > 1 else []
    return [sys.executable, "-m", "nestrec", *launch, "train", recipe, "--output", str(run), *options]


def measure_by_training(recipe: str, fixed_overrides: Overrides, num_ranks: int) -> Measure:
    """Return a function that runs a trial as a separate process and returns its best validation score.

    A trial that exceeds the time limit receives SIGTERM, saves a checkpoint, and counts with its score so far.
    """

    def measure(overrides: Overrides, run: Path, left_s: float | None) -> float:
        command = train_command(recipe, fixed_overrides, overrides, run, num_ranks)
        run.mkdir(parents=True, exist_ok=True)
        with (run / LOG_FILE).open("a") as log:
            print(shlex.join(command), file=log, flush=True)
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            try:
                code = process.wait(left_s)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)
                code = process.wait()
            except BaseException:
                process.send_signal(signal.SIGTERM)
                process.wait()
                raise
        if code not in (0, INTERRUPTED):
            return math.nan
        best = best_evaluation(load_run(run))
        return math.nan if best is None else mean_of_metric(best["metrics"], "model", best["headline"])

    return measure


def _optuna() -> Any:
    optuna = import_extra("optuna", "tune", "required by nestrec tune but not installed")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
