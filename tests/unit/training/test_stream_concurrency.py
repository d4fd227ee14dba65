"""Stream training on a dataset that other processes append to, restore, or train on at the same time."""

import shutil
from pathlib import Path

import pytest

from nestrec.base.errors import UserError
from nestrec.data.dataset_card import DatasetCard
from nestrec.data.incremental.append import append
from nestrec.data.incremental.generations import locked_dataset, restore
from nestrec.training.state import run_digest
from support.fail_points import armed
from support.stream_fixtures import BY_COUNT, COLUMNS, copy_run, drop_files, follow, stream_events


def test_stream_two_runs_on_one_dataset_read_each_event_once(base: tuple[Path, Path], tmp_path: Path) -> None:
    """Each run trains on every window; regression test: both appended it, so each event was stored twice."""
    drop_files(tmp_path / "events", stream_events(70), events_per_file=70)
    runs = [copy_run(*base, tmp_path / "a"), tmp_path / "b"]
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


def test_stream_appended_events_are_trained_before_the_window(base: tuple[Path, Path], tmp_path: Path) -> None:
    events = stream_events(65)
    drop_files(tmp_path / "events", events[:30], events_per_file=30)
    drop_files(tmp_path / "more", events[30:], events_per_file=35)
    run = copy_run(*base, tmp_path)
    window_sizes = list[int]()
    more = tmp_path / "more" / "part-00000.jsonl"
    with armed("stream.read", lambda: append(more, tmp_path / "data", format="log", overrides=COLUMNS) and None, at=1):
        follow(str(tmp_path / "events"), run, BY_COUNT, window_hooks=[lambda end: window_sizes.append(end.num_events)])
    assert window_sizes == [35, 30]


def test_stream_training_waits_for_a_dataset_lock(base: tuple[Path, Path], tmp_path: Path) -> None:
    drop_files(tmp_path / "events", stream_events(30), events_per_file=30)
    run = copy_run(*base, tmp_path)
    with locked_dataset(tmp_path / "data"):
        assert follow(str(tmp_path / "events"), run, BY_COUNT).trainer.state.windows_done == 0
    assert follow(str(tmp_path / "events"), run, BY_COUNT).trainer.state.windows_done == 1


def test_stream_training_stops_if_the_dataset_is_restored(base: tuple[Path, Path], tmp_path: Path) -> None:
    drop_files(tmp_path / "events", stream_events(90), events_per_file=90)
    run = copy_run(*base, tmp_path)
    with (
        armed("stream.read", lambda: restore(tmp_path / "data", 1), at=3),
        pytest.raises(UserError, match="this run was trained on other data"),
    ):
        follow(str(tmp_path / "events"), run, BY_COUNT)


def test_stream_training_rejects_a_restored_dataset_on_resume(base: tuple[Path, Path], tmp_path: Path) -> None:
    """The run's rows belong to users and items of later generations, whose ids may have been reused."""
    drop_files(tmp_path / "events", stream_events(60), events_per_file=60)
    run = copy_run(*base, tmp_path)
    follow(str(tmp_path / "events"), run, BY_COUNT)
    restore(tmp_path / "data", 0)
    with pytest.raises(UserError, match="this run was trained on other data"):
        follow(str(tmp_path / "events"), run, BY_COUNT)
    drop_files(tmp_path / "others", stream_events(90, seed=1), events_per_file=30)
    for path in sorted((tmp_path / "others").iterdir()):
        append(path, tmp_path / "data", format="log", overrides=COLUMNS)
    with pytest.raises(UserError, match="this run was trained on other data"):
        follow(str(tmp_path / "events"), run, BY_COUNT)
