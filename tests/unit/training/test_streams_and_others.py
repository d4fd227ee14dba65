"""Runs that follow a stream into data that others change meanwhile: they append to it, put it back, follow, too."""

import shutil
from pathlib import Path

import pytest

from nestrec.base.errors import UserError
from nestrec.data.dataset_card import DatasetCard
from nestrec.data.incremental.append import append
from nestrec.data.incremental.generations import growing, restore
from nestrec.training.state import run_digest
from support.fail_points import armed
from support.stream_fixtures import BY_COUNT, COLUMNS, copied, drop_files, follow, stream_events


def test_two_runs_that_follow_into_one_data_read_every_event_once(base: tuple[Path, Path], tmp_path: Path) -> None:
    """Each trains on every window, whoever has appended it; both appended it, and every event was there twice."""
    drop_files(tmp_path / "events", stream_events(70), events_a_file=70)
    runs = [copied(*base, tmp_path / "a"), tmp_path / "b"]
    shutil.copytree(runs[0], runs[1])
    source = str(tmp_path / "events")
    states = []

    def overtake() -> None:
        states.append(follow(source, runs[1], BY_COUNT).trainer.state)

    with armed("stream.read", overtake, at=1):
        states.append(follow(source, runs[0], BY_COUNT).trainer.state)
    assert [(state.windows_done, state.generation) for state in states] == [(2, 2), (2, 2)]
    assert run_digest(runs[0]) == run_digest(runs[1])
    assert DatasetCard.load(tmp_path / "a" / "data").counts.events == DatasetCard.load(base[1]).counts.events + 60


def test_what_is_appended_while_a_window_is_read_is_trained_on_before_it(
    base: tuple[Path, Path], tmp_path: Path
) -> None:
    events = stream_events(65)
    drop_files(tmp_path / "events", events[:30], events_a_file=30)
    drop_files(tmp_path / "more", events[30:], events_a_file=35)
    run = copied(*base, tmp_path)
    told = list[int]()
    more = tmp_path / "more" / "part-00000.jsonl"
    with armed("stream.read", lambda: append(more, tmp_path / "data", format="log", overrides=COLUMNS) and None, at=1):
        follow(str(tmp_path / "events"), run, BY_COUNT, window_hooks=[lambda end: told.append(end.num_events)])
    assert told == [35, 30]


def test_a_run_that_follows_waits_for_another_process_that_changes_its_data(
    base: tuple[Path, Path], tmp_path: Path
) -> None:
    drop_files(tmp_path / "events", stream_events(30), events_a_file=30)
    run = copied(*base, tmp_path)
    with growing(tmp_path / "data"):
        assert follow(str(tmp_path / "events"), run, BY_COUNT).trainer.state.windows_done == 0
    assert follow(str(tmp_path / "events"), run, BY_COUNT).trainer.state.windows_done == 1


def test_data_that_is_put_back_while_a_run_follows_ends_it(base: tuple[Path, Path], tmp_path: Path) -> None:
    drop_files(tmp_path / "events", stream_events(90), events_a_file=90)
    run = copied(*base, tmp_path)
    with (
        armed("stream.read", lambda: restore(tmp_path / "data", 1), at=3),
        pytest.raises(UserError, match="not the data that this run was trained on"),
    ):
        follow(str(tmp_path / "events"), run, BY_COUNT)


def test_data_that_was_taken_back_behind_a_run_is_not_what_the_run_goes_on_with(
    base: tuple[Path, Path], tmp_path: Path
) -> None:
    """Its rows stand for users and items that came after that; others may have their numbers by now."""
    drop_files(tmp_path / "events", stream_events(60), events_a_file=60)
    run = copied(*base, tmp_path)
    follow(str(tmp_path / "events"), run, BY_COUNT)
    restore(tmp_path / "data", 0)
    with pytest.raises(UserError, match="not the data that this run was trained on"):
        follow(str(tmp_path / "events"), run, BY_COUNT)
    drop_files(tmp_path / "others", stream_events(90, seed=1), events_a_file=30)
    for path in sorted((tmp_path / "others").iterdir()):
        append(path, tmp_path / "data", format="log", overrides=COLUMNS)
    with pytest.raises(UserError, match="not the data that this run was trained on"):
        follow(str(tmp_path / "events"), run, BY_COUNT)
