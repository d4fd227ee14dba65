"""`nestrec tune`: search over dotted options under a budget, by Optuna, in a folder from which it can go on.

    folder/study.log         what was tried and how it went; several processes may share it
    folder/run-DIGEST        the run of each try, named by what was tried: a try that was cut short goes on in it
    folder/best.json         the best options so far, with the command that trains with them
    folder/search.json       what all tries have in common: a search goes on with the same, and with nothing else

Each try is a process of its own (`nestrec train`, on several ranks `nestrec launch`), judged by its best validation.
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
"""(options, run folder, seconds that are left or none) to the best validation score; NaN where there is none."""
_MOST_FAILED, _FIRST_FAILED = 10, 3
"""Tries in a row without a score that end a search; so many are enough where none had one before."""
BEST_FILE, STUDY_FILE, LOG_FILE, SEARCH_FILE = "best.json", "study.log", "train.log", "search.json"
USUAL: dict[str, str] = {
    "optimizer.learning_rate": "3e-4..1e-2",
    "task.encoder.dropout": "0.1..0.6",
    "task.encoder.num_layers": "1..4",
}
"""What is searched where nothing is said."""


@dataclass(frozen=True, slots=True)
class Range:
    """From low to high; logarithmic where that spans a factor of ten."""

    low: float
    high: float
    is_whole: bool

    def suggest(self, trial: Any, option: str) -> str:
        is_log = self.low > 0 and self.high / self.low >= 10
        if self.is_whole:
            return str(trial.suggest_int(option, int(self.low), int(self.high), log=is_log))
        return f"{trial.suggest_float(option, self.low, self.high, log=is_log):.6g}"

    @property
    def first(self) -> str:
        """A value of it."""
        return str(int(self.low)) if self.is_whole else f"{self.low:.6g}"

    def to_plain(self) -> str:
        """What must stay the same where a search goes on: its ends may move."""
        return "a range of whole numbers" if self.is_whole else "a range"


@dataclass(frozen=True, slots=True)
class Choices:
    """One of several values, as they are typed."""

    values: tuple[str, ...]

    def suggest(self, trial: Any, option: str) -> str:
        return str(trial.suggest_categorical(option, list(self.values)))

    @property
    def first(self) -> str:
        """A value of it."""
        return self.values[0]

    def to_plain(self) -> str:
        """What must stay the same where a search goes on."""
        return ",".join(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search has found."""

    overrides: dict[str, str]
    score: float
    tries: int
    """that have a score, those of earlier starts included"""
    folder: Path
    """the run of the best one"""


def parse_search(given: Sequence[str]) -> dict[str, Range | Choices]:
    """`option=low..high` or `option=a,b,c`; what is usual where nothing is given."""
    found: dict[str, Range | Choices] = {}
    for text in given or [f"{option}={what}" for option, what in USUAL.items()]:
        option, sign, what = text.partition("=")
        if not sign or not what or option in found:
            remedy = (
                "write option=low..high or option=a,b,c, each option once, such as optimizer.learning_rate=1e-4..1e-2"
            )
            raise UserError("says not what to search", option="--search", value=text, remedy=remedy)
        found[option] = _parse_range(text, what) if ".." in what else Choices(tuple(what.split(",")))
    return found


def _parse_range(text: str, what: str) -> Range:
    low, _, high = what.partition("..")
    try:
        bounds = float(low), float(high)
    except ValueError:
        bounds = math.nan, math.nan
    remedy = "give two numbers, the smaller one first: 1e-4..1e-2"
    require(bounds[0] < bounds[1], "is no range", option="--search", value=text, remedy=remedy)
    return Range(*bounds, is_whole=low.strip("-").isdigit() and high.isdigit())


def tune(
    folder: Path,
    search: Mapping[str, Range | Choices],
    measure: Measure,
    *,
    runs: int | None,
    minutes: float | None,
    about: Mapping[str, str] | None = None,
    seed: int = 0,
    clock: Clock | None = None,
    said: Callable[[str], None] = print,
) -> SearchResult:
    """Try options until so many tries have a score, so many minutes have gone by since this start, or tries fail.

    about: what all tries have in common, such as the recipe, by name; scores of others are not compared with them.
    """
    if runs is None and minutes is None:
        remedy = "give --runs 20, --minutes 60, or both"
        raise UserError("a search needs an end", option="--runs", value=None, remedy=remedy)
    optuna = _optuna()
    journal = optuna.storages.journal
    folder.mkdir(parents=True, exist_ok=True)
    _keep_search(
        folder, {**(about or {}), **{f"--search {option}": what.to_plain() for option, what in search.items()}}
    )
    study = optuna.create_study(
        storage=journal.JournalStorage(journal.JournalFileBackend(str(folder / STUDY_FILE))),
        study_name="tune",
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=min(10, runs or 10)),
        load_if_exists=True,
    )
    _take_up(study, optuna)
    clock = clock or RealClock()
    end_s = None if minutes is None else clock.now_s() + 60 * minutes
    num_failed = 0
    while (runs is None or _num_scored(study) < runs) and (end_s is None or clock.now_s() < end_s):
        trial = study.ask()
        overrides = {option: what.suggest(trial, option) for option, what in search.items()}
        run = folder / run_name(overrides)
        score = measure(overrides, run, None if end_s is None else end_s - clock.now_s())
        num_failed = 0 if math.isfinite(score) else num_failed + 1
        is_over = end_s is not None and clock.now_s() >= end_s
        if math.isfinite(score):
            study.tell(trial, score)
        elif not is_over:  # else it stays under way: the next start goes on with it
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        outcome = f"{score:.4f}" if math.isfinite(score) else _without_score(run, is_over=is_over)
        said(f"try {trial.number}: {outcome} {json.dumps({'run': run.name, 'overrides': overrides})}")
        _keep_best(study, search, folder)
        if num_failed >= (_MOST_FAILED if _num_scored(study) else _FIRST_FAILED):
            raise UserError(
                f"{num_failed} tries in a row have no validation score",
                option="tune",
                value=str(folder),
                remedy=f"{run / LOG_FILE} tells why; mend it, and the same command goes on",
            )
    if not _num_scored(study):
        remedy = (
            f"give more, and the same command goes on; {LOG_FILE} of each run folder in {folder} tells how far it came"
        )
        raise UserError("no try has a validation score so far", option="--minutes", value=minutes, remedy=remedy)
    return _keep_best(study, search, folder)


def _without_score(run: Path, *, is_over: bool) -> str:
    return "the time was over before its first validation" if is_over else f"no score ({run / LOG_FILE} tells why)"


def run_name(overrides: Overrides) -> str:
    """The folder of a try: the same options are the same run, which goes on where it was."""
    return f"run-{sha256(json.dumps(dict(sorted(overrides.items()))).encode()).hexdigest()[:12]}"


def _keep_search(folder: Path, said: Mapping[str, str]) -> None:
    """Refuse to go on with a search of something else: its scores would be taken for those of this one."""
    file = folder / SEARCH_FILE
    before: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    mistakes = ErrorCollector()
    for name in dict.fromkeys([*before, *said] if before else ()):
        may_come_later = name == "data" or name.startswith("--search")
        if before.get(name) == said.get(name) or (may_come_later and not (name in before and name in said)):
            continue
        mistakes.add(
            f"holds a search with another {name}: {before.get(name, 'none')}",
            option="--output",
            value=str(folder),
            remedy=f"name another folder, or say the same as then (now: {said.get(name, 'none')})",
        )
    mistakes.raise_if_any()
    file.write_text(standard_json({**before, **said}, indent=2) + "\n")


def about_tries(recipe: str, given: Overrides, data: Path) -> dict[str, str]:
    """What all tries of a search have in common. data: folder of the dataset."""
    digest = {"data": DatasetCard.load(data).digest_of_files} if (data / CARD_FILE).exists() else {}
    return {"recipe": recipe, **{f"--{name}": value for name, value in given.items()}, **digest}


def _take_up(study: Any, optuna: Any) -> None:
    """Tries that were under way when the search was killed come first, with the options that they had."""
    for trial in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        study.enqueue_trial(trial.params)


def _num_scored(study: Any) -> int:
    return sum(trial.value is not None for trial in study.get_trials(deepcopy=False))


def _keep_best(study: Any, search: Mapping[str, Range | Choices], folder: Path) -> SearchResult:
    best = max(
        (t for t in study.get_trials(deepcopy=False) if t.value is not None), key=lambda t: t.value, default=None
    )
    if best is None:
        return SearchResult(overrides={}, score=math.nan, tries=0, folder=folder)
    overrides = {
        option: what.suggest(_Fixed(best.params), option) for option, what in search.items() if option in best.params
    }
    found = SearchResult(
        overrides=overrides, score=best.value, tries=_num_scored(study), folder=folder / run_name(overrides)
    )
    plain = {"score": found.score, "tries": found.tries, "overrides": overrides, "run": found.folder.name}
    (folder / BEST_FILE).write_text(standard_json(plain, indent=2) + "\n")
    return found


@dataclass(frozen=True, slots=True)
class _Fixed:
    """Suggests what was tried, so that it is written as it was then."""

    params: Mapping[str, Any]

    def suggest_int(self, option: str, *_: Any, **__: Any) -> int:
        return int(self.params[option])

    def suggest_float(self, option: str, *_: Any, **__: Any) -> float:
        return float(self.params[option])

    def suggest_categorical(self, option: str, *_: Any) -> str:
        return str(self.params[option])


def train_command(recipe: str, given: Overrides, overrides: Overrides, run: Path, ranks: int) -> list[str]:
    """The command of one try."""
    options = [part for name, value in {**given, **overrides}.items() for part in (f"--{name}", value)]
    launch = ["launch", "-n", str(ranks)] if ranks > 1 else []
    return [sys.executable, "-m", "nestrec", *launch, "train", recipe, "--output", str(run), *options]


def by_training(recipe: str, given: Overrides, ranks: int) -> Measure:
    """Trains a try in a process of its own; one that runs out of time is told to save, and counts as far as it came."""

    def measure(overrides: Overrides, run: Path, left_s: float | None) -> float:
        command = train_command(recipe, given, overrides, run, ranks)
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
    optuna = import_extra("optuna", "tune", "is needed to tune")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
