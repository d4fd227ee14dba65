"""`nestrec tune`: the search space, the limits of a search, and resuming."""

import json
import math
from pathlib import Path

import pytest

from nestrec.base.errors import UserError
from nestrec.data.synthetic import synthetic_logs as synthetic
from nestrec.tuning import Choices, Overrides, Range, measure_by_training, parse_search, run_name, train_command, tune
from nestrec_bench.harness.clocks import ManualClock

pytest.importorskip("optuna")
SEARCH = parse_search(["rate=1e-4..1e-1", "kind=good,bad"])


def score(overrides: Overrides, run: Path, left_s: float | None) -> float:
    """Returns a score with its maximum at rate 0.01 and kind good."""
    return -abs(math.log10(float(overrides["rate"])) + 2) - (overrides["kind"] == "bad")


def test_tuning_search_ranges_and_choices_are_parsed() -> None:
    assert parse_search(["a=1..4", "b=0.1..0.6", "c=x,2"]) == {
        "a": Range(1, 4, is_integer=True),
        "b": Range(0.1, 0.6, is_integer=False),
        "c": Choices(("x", "2")),
    }
    assert "optimizer.learning_rate" in parse_search([])
    for wrong in ("a", "a=", "a=4..1", "a=x..y"):
        with pytest.raises(UserError, match="--search"):
            parse_search([wrong])


def test_tuning_finds_the_best_trial_and_resumes(tmp_path: Path) -> None:
    result = tune(tmp_path, SEARCH, score, num_trials=8, minutes=None, report=lambda _: None)
    assert (result.num_trials, result.overrides["kind"]) == (8, "good")
    assert result.score > -1
    best = json.loads((tmp_path / "best.json").read_text())
    assert (best["overrides"], best["run"]) == (result.overrides, run_name(result.overrides))
    trials: list[Overrides] = []

    def killed(overrides: Overrides, run: Path, left_s: float | None) -> float:
        trials.append(dict(overrides))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(tmp_path, SEARCH, killed, num_trials=10, minutes=None)

    def again(overrides: Overrides, run: Path, left_s: float | None) -> float:
        trials.append(dict(overrides))
        return score(overrides, run, left_s)

    result = tune(tmp_path, SEARCH, again, num_trials=10, minutes=None, seed=1, report=lambda _: None)
    assert result.num_trials == 10
    assert (trials[0], len(trials)) == (trials[1], 3), "the interrupted trial is repeated first, in the same run folder"


def test_tuning_never_resumes_with_scores_of_another_search(tmp_path: Path) -> None:
    """Regression test: a completed search returned its best trial as the result for other data."""
    shared = {"recipe": "auto", "--data.folder": "data/a", "data": "1"}

    def search(shared: dict[str, str], *spaces: str) -> float:
        return tune(
            tmp_path, parse_search(spaces), score, num_trials=2, minutes=None, shared=shared, report=lambda _: None
        ).score

    first = search(shared, "rate=1e-4..1e-1", "kind=good,bad")
    assert search(shared, "rate=1e-3..1e-1", "kind=good,bad") == first
    for other in ({"recipe": "demo"}, {"--data.folder": "data/b"}, {"data": "2"}, {"--training.epochs": "3"}):
        with pytest.raises(UserError, match=f"contains a search with a different {next(iter(other))}"):
            search({**shared, **other}, "rate=1e-4..1e-1", "kind=good,bad")
    for spaces in ("kind=good,bad,odd", "kind=1..2"):
        with pytest.raises(UserError, match=r"different --search kind: good,bad.*[Uu]se another folder"):
            search(shared, "rate=1e-4..1e-1", spaces)


def test_tuning_stops_at_time_budget_and_skips_failed_trials(tmp_path: Path) -> None:
    clock = ManualClock()
    remaining: list[float | None] = []

    def slow(overrides: Overrides, run: Path, left_s: float | None) -> float:
        remaining.append(left_s)
        clock.sleep(25)
        return math.nan if len(remaining) == 1 else 1.0

    result = tune(tmp_path, SEARCH, slow, num_trials=None, minutes=1, clock=clock, report=lambda _: None)
    assert (remaining, result.num_trials) == ([60, 35, 10], 2)
    with pytest.raises(UserError, match="a search needs a limit"):
        tune(tmp_path, SEARCH, slow, num_trials=None, minutes=None)


def test_tuning_trial_cut_by_time_is_reported_and_resumed(tmp_path: Path) -> None:
    trials: list[Overrides] = []
    reports: list[str] = []

    def cut_short(overrides: Overrides, run: Path, left_s: float | None) -> float:
        trials.append(overrides)
        return math.nan if len(trials) == 1 else 1.0

    with pytest.raises(UserError, match=r"--time-budget-min=0.4: no trial has a validation score yet.*longer time"):
        tune(tmp_path, SEARCH, cut_short, num_trials=None, minutes=0.4, clock=TickingClock(), report=reports.append)
    tune(tmp_path, SEARCH, cut_short, num_trials=1, minutes=None, seed=1, report=reports.append)
    assert trials[0] == trials[1]
    assert reports[0].startswith("trial 0: time limit reached before the first validation {")
    assert reports[1].startswith("trial 1: 1.0000 {")
    with pytest.raises(UserError):
        tune(tmp_path / "failed", SEARCH, lambda *_: math.nan, num_trials=1, minutes=None, report=reports.append)
    assert "no score (" in reports[2]
    assert "nan" not in "".join(reports)


def test_tuning_stops_if_all_trials_fail(tmp_path: Path) -> None:
    trials: list[Overrides] = []

    def failing(overrides: Overrides, run: Path, left_s: float | None) -> float:
        trials.append(overrides)
        return math.nan if len(trials) < 50 else 1.0

    with pytest.raises(UserError, match=r"3 consecutive trials have no validation score[\s\S]*train.log"):
        tune(tmp_path, SEARCH, failing, num_trials=2, minutes=None, report=lambda _: None)
    tune(tmp_path, SEARCH, score, num_trials=1, minutes=None, report=lambda _: None)
    with pytest.raises(UserError, match="10 consecutive trials"):
        tune(tmp_path, SEARCH, failing, num_trials=2, minutes=None, report=lambda _: None)


class TickingClock(ManualClock):
    """Clock that advances by ten seconds at each reading."""

    def now_s(self) -> float:
        self.sleep(10)
        return super().now_s()


def test_tuning_launches_several_ranks(tmp_path: Path) -> None:
    command = train_command("demo", {"data.folder": "d"}, {"a": "1"}, tmp_path, 2)
    assert command[3:] == [
        "launch",
        "-n",
        "2",
        "train",
        "demo",
        "--output",
        str(tmp_path),
        "--data.folder",
        "d",
        "--a",
        "1",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_tuning_of_real_runs(tmp_path: Path, ranks: int) -> None:
    synthetic.generate(synthetic.preset("tiny", num_users=40, num_items=30), tmp_path / "data")
    overrides = {
        "data.folder": str(tmp_path / "data"),
        "task.kind": "retrieval",
        "training.max_steps": "3",
        "training.device": "cpu",
        "task.evaluation.baselines": "popularity",
    }
    search = parse_search(["optimizer.learning_rate=1e-3,1e-2"])
    result = tune(tmp_path / "tune", search, measure_by_training("auto", overrides, ranks), num_trials=2, minutes=5)
    assert 0 <= result.score <= 1
    assert (result.folder / "config.json").exists()
