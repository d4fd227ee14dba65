"""Stream training when the source changes, or when its topic gets more partitions."""

from pathlib import Path
from typing import Any

import pytest

from nestrec.base.errors import UserError
from nestrec.checkpoint import CheckpointSaveError
from nestrec.data.dataset_card import DatasetCard
from nestrec.data.streaming.kafka_source import KafkaSource
from nestrec.training.state import run_digest
from nestrec.training.training_session import WindowEnd
from support.fail_points import armed
from support.stream_fixtures import (
    BY_COUNT,
    Crash,
    copy_run,
    crash,
    drop_files,
    follow,
    stream_events,
    topic,
    without_times,
)


def test_stream_added_kafka_partitions_are_read_without_restart(
    base: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mock brokers cannot add partitions, so the last of four is hidden from the metadata until a window has ended."""
    known: dict[str, int] = {}
    query_metadata = KafkaSource._metadata

    def metadata(source: KafkaSource) -> Any:
        response = query_metadata(source)
        for partition in range(known["partitions"], 4):
            del response.topics["events"].partitions[partition]
        return response

    def add(end: WindowEnd) -> None:
        known["partitions"] = 4 if end.number == 1 else known["partitions"]

    monkeypatch.setattr(KafkaSource, "_metadata", metadata)
    with topic(stream_events(100), partitions=4) as source:
        for name, points in (("uninterrupted", ()), ("cut", ("data.append.before_card", "follow.window"))):
            run = copy_run(*base, tmp_path / name)
            known["partitions"] = 3
            for point in points:
                with armed(point, crash, at=2), pytest.raises((Crash, CheckpointSaveError)):
                    follow(source, run, {**BY_COUNT, "window.events": 25}, window_hooks=[add])
            state = follow(source, run, {**BY_COUNT, "window.events": 25}, window_hooks=[add]).trainer.state
            assert state.windows_done == 4
    cards = [DatasetCard.load(tmp_path / name / "data") for name in ("uninterrupted", "cut")]
    assert cards[0].generations[-1].stream["position"]["offsets"] == {f"{partition}": 25 for partition in range(4)}
    assert without_times(cards[0]) == without_times(cards[1])
    assert run_digest(tmp_path / "cut" / "run") == run_digest(tmp_path / "uninterrupted" / "run")


def test_stream_source_change_is_rejected_until_confirmed(base: tuple[Path, Path], tmp_path: Path) -> None:
    """Offsets of one source are meaningless in another: files of equal names were considered read."""
    first = tmp_path / "first"
    second = tmp_path / "second"
    events = stream_events(90)
    drop_files(first, events[:30], events_per_file=30)
    drop_files(second, events[30:60], events_per_file=30)
    run = copy_run(*base, tmp_path)
    known = follow(str(first), run, BY_COUNT).trainer.state
    with pytest.raises(UserError, match=r"(?s)SOURCE.*second.*first.*--on_source_change restart"):
        follow(str(second), run, BY_COUNT)
    assert DatasetCard.load(tmp_path / "data").generation == known.generation, "nothing was read or trained on"
    restart = {**BY_COUNT, "on_source_change": "restart"}
    for _ in range(2):  # the same command resumes at the stored offset
        assert follow(str(second), run, restart).trainer.state.windows_done == 2
    moved = second.rename(tmp_path / "third")
    drop_files(tmp_path / "more", events[60:], events_per_file=30)
    (tmp_path / "more" / "part-00000.jsonl").rename(moved / "part-00001.jsonl")
    with pytest.raises(UserError, match="is not the source that was read before"):
        follow(str(moved), run, BY_COUNT)
    assert follow(str(moved), run, {**BY_COUNT, "on_source_change": "moved"}).trainer.state.windows_done == 3
    states = [generation.stream for generation in DatasetCard.load(tmp_path / "data").generations]
    assert not any(states[:-1]), "only the newest generation stores the names of the files"
    # The run returns to the first source, whose only file was read completely.
    assert follow(str(first), run, restart).trainer.state.windows_done == 3
    with topic(events) as other, pytest.raises(UserError, match="the kind of source differs"):
        follow(other, run, {**BY_COUNT, "on_source_change": "moved"})
    assert DatasetCard.load(tmp_path / "data").counts.events == DatasetCard.load(base[1]).counts.events + 90
