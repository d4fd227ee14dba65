from io import StringIO

import pytest
from rich.console import Console

from nestrec.report import LiveProgress, progress_for
from nestrec.tasks.metrics import ConfidenceInterval
from nestrec.tasks.task import Evaluation
from nestrec_bench.harness.clocks import ManualClock

VALUES = {"loss": 3.21, "samples_per_s": 1234.0, "tokens_per_s": 56789.0, "memory_mib": 2048.0, "step_ms": 9.0}
EVALUATION = Evaluation(
    "valid",
    "ndcg@10",
    {
        "model": {"ndcg@10": ConfidenceInterval(0.2, 0.1, 0.3)},
        "popularity": {"ndcg@10": ConfidenceInterval(0.05, 0.0, 0.1)},
    },
)


def plain_console() -> tuple[Console, StringIO]:
    file = StringIO()
    return Console(file=file, force_terminal=False, width=40), file


def terminal() -> tuple[Console, StringIO]:
    file = StringIO()
    return Console(file=file, force_terminal=True, width=120, height=30), file


def test_live_log_without_terminal_prints_plain_lines() -> None:
    (console, file) = plain_console()
    clock = ManualClock()
    with LiveProgress(num_epochs=3, console=console, clock=clock) as progress:
        progress.on_train_start(300, 0)
        for step in range(1, 26):
            clock.sleep(1)
            progress.on_step_report(step, 0, VALUES)
    lines = file.getvalue().splitlines()
    assert [line.split("  ")[1] for line in lines] == ["step 1/300", "step 11/300", "step 21/300", "step 25/300"]
    assert lines[0] == "epoch 1/3  step 1/300  loss 3.2100  1.23k samples/s  56.8k tokens/s  2 GiB  ETA 4m 59s"
    assert "\x1b" not in file.getvalue()


def test_live_eta_of_resumed_run_counts_new_steps() -> None:
    (console, file) = plain_console()
    clock = ManualClock()
    with LiveProgress(console=console, clock=clock) as progress:
        progress.on_train_start(120, 100)
        clock.sleep(10)
        progress.on_step_report(110, 4, VALUES)
    assert "resumed from step 100" in file.getvalue()
    assert "ETA 10s" in file.getvalue()


def test_live_log_of_endless_run_shows_steps() -> None:
    for console, file in (plain_console(), terminal()):
        with LiveProgress(console=console, clock=ManualClock()) as progress:
            progress.on_train_start(None, 3)
            progress.on_step_report(60, 25, VALUES)
        assert "step 60  loss 3.2100" in file.getvalue()
        assert "ETA" not in file.getvalue()
        assert "epoch" not in file.getvalue()


def test_live_log_prints_evaluations_and_warnings() -> None:
    console, file = plain_console()
    with LiveProgress(console=console, clock=ManualClock()) as progress:
        progress.on_evaluation(EVALUATION, 40, 2)
        progress.on_warning("[bold] is not markup here")
    assert file.getvalue().splitlines() == [
        "valid after epoch 2, ndcg@10: model 0.2000, popularity 0.0500 (4.00x popularity: no clear lead)",
        "warning: [bold] is not markup here",
    ]


def test_live_terminal_shows_latest_metrics() -> None:
    console, file = terminal()
    clock = ManualClock()
    with LiveProgress(num_epochs=3, console=console, clock=clock) as progress:
        progress.on_train_start(300, 0)
        clock.sleep(2)
        progress.on_step_report(150, 1, VALUES)
        with progress.stage("checkpoint") as stage:
            stage("rows", 0.5)
        progress.on_evaluation(EVALUATION, 150, 2)
    assert "epoch 2/3  step 150/300" in file.getvalue()
    assert "56.8k tokens/s" in file.getvalue()
    assert "(4.00x popularity: no clear lead)" in file.getvalue()


def test_live_log_accepts_missing_or_nonfinite_values() -> None:
    console, file = plain_console()
    with LiveProgress(console=console, clock=ManualClock()) as progress:
        progress.on_step_report(0, 0, {"loss": float("nan"), "memory_mib": None})
    assert "loss nan" in file.getvalue()


def test_progress_of_quick_stages_prints_nothing() -> None:
    (console, file) = plain_console()
    clock = ManualClock()
    with progress_for("prepare", console=console, clock=clock) as progress:
        progress("reading", 0.5)
        clock.sleep(1.9)
        progress("reading", 1.0)
    assert file.getvalue() == ""


def test_progress_of_long_stages_prints_plain_lines() -> None:
    (console, file) = plain_console()
    clock = ManualClock()
    with progress_for("prepare", console=console, clock=clock) as progress:
        for second in range(25):
            progress("sorting", second / 25)
            clock.sleep(1)
    assert file.getvalue().splitlines() == [
        "prepare: sorting: 8%, 2s",
        "prepare: sorting: 48%, 12s",
        "prepare: sorting: 88%, 22s",
        "prepare: done in 25s",
    ]


def test_progress_of_long_stages_shows_bar_on_terminal() -> None:
    (console, file) = terminal()
    clock = ManualClock()
    with progress_for("evaluate", console=console, clock=clock) as progress:
        progress("users", 0.25)
        clock.sleep(5)
    assert "evaluate: users" in file.getvalue()
    assert "25%" in file.getvalue()


def test_progress_of_failed_stage_is_not_done() -> None:
    (console, file) = plain_console()
    clock = ManualClock()
    progress = progress_for("prepare", console=console, clock=clock)
    clock.sleep(5)
    with pytest.raises(ValueError, match="broken"), progress:
        raise ValueError("broken")
    assert file.getvalue() == ""
