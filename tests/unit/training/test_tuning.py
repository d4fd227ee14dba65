"""`nestrec tune`: what is searched, when it ends, and how it goes on."""

import json
import math
from pathlib import Path

import pytest

from nestrec.base.errors import UserError
from nestrec.data.synthetic import synthetic_logs as synthetic
from nestrec.tuning import Choices, Overrides, Range, by_training, parse_search, run_name, train_command, tune
from nestrec_bench.harness.clocks import ManualClock

pytest.importorskip("optuna")
SEARCH = parse_search(["rate=1e-4..1e-1", "kind=good,bad"])


def score(overrides: Overrides, run: Path, left_s: float | None) -> float:
    """Best at a rate of 0.01 of the good kind."""
    return -abs(math.log10(float(overrides["rate"])) + 2) - (overrides["kind"] == "bad")


def test_ranges_and_choices_are_read_as_they_are_typed() -> None:
    assert parse_search(["a=1..4", "b=0.1..0.6", "c=x,2"]) == {
        "a": Range(1, 4, is_whole=True),
        "b": Range(0.1, 0.6, is_whole=False),
        "c": Choices(("x", "2")),
    }
    assert "optimizer.learning_rate" in parse_search([])
    for wrong in ("a", "a=", "a=4..1", "a=x..y"):
        with pytest.raises(UserError, match="--search"):
            parse_search([wrong])


def test_a_search_finds_what_is_good_and_goes_on_where_it_was(tmp_path: Path) -> None:
    found = tune(tmp_path, SEARCH, score, runs=8, minutes=None, said=lambda _: None)
    assert (found.tries, found.overrides["kind"]) == (8, "good")
    assert found.score > -1
    best = json.loads((tmp_path / "best.json").read_text())
    assert (best["overrides"], best["run"]) == (found.overrides, run_name(found.overrides))
    tried: list[Overrides] = []

    def killed(overrides: Overrides, run: Path, left_s: float | None) -> float:
        tried.append(dict(overrides))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(tmp_path, SEARCH, killed, runs=10, minutes=None)

    def again(overrides: Overrides, run: Path, left_s: float | None) -> float:
        tried.append(dict(overrides))
        return score(overrides, run, left_s)

    found = tune(tmp_path, SEARCH, again, runs=10, minutes=None, seed=1, said=lambda _: None)
    assert found.tries == 10
    assert (tried[0], len(tried)) == (tried[1], 3), "what was under way comes first, in the same run folder"


def test_a_search_never_goes_on_with_the_scores_of_another(tmp_path: Path) -> None:
    """It has all its tries already: the best of them was told as the answer for other data."""
    about = {"recipe": "auto", "--data.folder": "data/a", "data": "1"}

    def search(about: dict[str, str], *wanted: str) -> float:
        return tune(tmp_path, parse_search(wanted), score, runs=2, minutes=None, about=about, said=lambda _: None).score

    first = search(about, "rate=1e-4..1e-1", "kind=good,bad")
    assert search(about, "rate=1e-3..1e-1", "kind=good,bad") == first
    for other in ({"recipe": "demo"}, {"--data.folder": "data/b"}, {"data": "2"}, {"--training.epochs": "3"}):
        with pytest.raises(UserError, match=f"holds a search with another {next(iter(other))}"):
            search({**about, **other}, "rate=1e-4..1e-1", "kind=good,bad")
    for wanted in ("kind=good,bad,odd", "kind=1..2"):
        with pytest.raises(UserError, match=r"another --search kind: good,bad.*name another folder"):
            search(about, "rate=1e-4..1e-1", wanted)


def test_time_ends_a_search_and_failures_count_for_nothing(tmp_path: Path) -> None:
    clock = ManualClock()
    left: list[float | None] = []

    def slow(overrides: Overrides, run: Path, left_s: float | None) -> float:
        left.append(left_s)
        clock.sleep(25)
        return math.nan if len(left) == 1 else 1.0

    found = tune(tmp_path, SEARCH, slow, runs=None, minutes=1, clock=clock, said=lambda _: None)
    assert (left, found.tries) == ([60, 35, 10], 2)
    with pytest.raises(UserError, match="a search needs an end"):
        tune(tmp_path, SEARCH, slow, runs=None, minutes=None)


def test_a_try_that_time_has_cut_short_is_told_in_words_and_goes_on_with_the_next_start(tmp_path: Path) -> None:
    tried: list[Overrides] = []
    told: list[str] = []

    def cut_short(overrides: Overrides, run: Path, left_s: float | None) -> float:
        tried.append(overrides)
        return math.nan if len(tried) == 1 else 1.0

    with pytest.raises(UserError, match=r"--minutes=0.4: no try has a validation score so far.*give more"):
        tune(tmp_path, SEARCH, cut_short, runs=None, minutes=0.4, clock=Ticking(), said=told.append)
    tune(tmp_path, SEARCH, cut_short, runs=1, minutes=None, seed=1, said=told.append)
    assert tried[0] == tried[1]
    assert told[0].startswith("try 0: the time was over before its first validation {")
    assert told[1].startswith("try 1: 1.0000 {")
    with pytest.raises(UserError):
        tune(tmp_path / "failed", SEARCH, lambda *_: math.nan, runs=1, minutes=None, said=told.append)
    assert "no score (" in told[2]
    assert "nan" not in "".join(told)


def test_a_search_whose_tries_all_fail_ends(tmp_path: Path) -> None:
    tried: list[Overrides] = []

    def failing(overrides: Overrides, run: Path, left_s: float | None) -> float:
        tried.append(overrides)
        return math.nan if len(tried) < 50 else 1.0

    with pytest.raises(UserError, match=r"3 tries in a row have no validation score[\s\S]*train.log"):
        tune(tmp_path, SEARCH, failing, runs=2, minutes=None, said=lambda _: None)
    tune(tmp_path, SEARCH, score, runs=1, minutes=None, said=lambda _: None)
    with pytest.raises(UserError, match="10 tries in a row"):
        tune(tmp_path, SEARCH, failing, runs=2, minutes=None, said=lambda _: None)


class Ticking(ManualClock):
    """Ten seconds go by whenever somebody looks."""

    def now_s(self) -> float:
        self.sleep(10)
        return super().now_s()


def test_several_ranks_are_launched(tmp_path: Path) -> None:
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
def test_real_runs_are_tuned(tmp_path: Path, ranks: int) -> None:
    synthetic.generate(synthetic.preset("tiny", num_users=40, num_items=30), tmp_path / "data")
    given = {
        "data.folder": str(tmp_path / "data"),
        "task.kind": "retrieval",
        "training.max_steps": "3",
        "training.device": "cpu",
        "task.evaluation.baselines": "popularity",
    }
    search = parse_search(["optimizer.learning_rate=1e-3,1e-2"])
    found = tune(tmp_path / "tune", search, by_training("auto", given, ranks), runs=2, minutes=5)
    assert 0 <= found.score <= 1
    assert (found.folder / "config.json").exists()
