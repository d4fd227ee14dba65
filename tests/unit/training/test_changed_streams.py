"""A stream that a run follows is given another source, or its topic more partitions."""

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
    copied,
    crash,
    drop_files,
    follow,
    stream_events,
    topic,
    without_times,
)


def test_partitions_that_a_topic_is_given_later_are_read_without_a_restart_and_with_the_same_bits_after_a_kill(
    base: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mock brokers cannot add partitions: the last of four is kept from their answers until a window has ended."""
    known: dict[str, int] = {}
    asked = KafkaSource._metadata

    def metadata(source: KafkaSource) -> Any:
        found = asked(source)
        for partition in range(known["partitions"], 4):
            del found.topics["events"].partitions[partition]
        return found

    def add(end: WindowEnd) -> None:
        known["partitions"] = 4 if end.number == 1 else known["partitions"]

    monkeypatch.setattr(KafkaSource, "_metadata", metadata)
    with topic(stream_events(100), partitions=4) as source:
        for name, points in (("whole", ()), ("cut", ("data.append.before_card", "follow.window"))):
            run = copied(*base, tmp_path / name)
            known["partitions"] = 3
            for point in points:
                with armed(point, crash, at=2), pytest.raises((Crash, CheckpointSaveError)):
                    follow(source, run, {**BY_COUNT, "window.events": 25}, window_hooks=[add])
            state = follow(source, run, {**BY_COUNT, "window.events": 25}, window_hooks=[add]).trainer.state
            assert state.windows_done == 4
    cards = [DatasetCard.load(tmp_path / name / "data") for name in ("whole", "cut")]
    assert cards[0].generations[-1].stream["position"]["offsets"] == {f"{partition}": 25 for partition in range(4)}
    assert without_times(cards[0]) == without_times(cards[1])
    assert run_digest(tmp_path / "cut" / "run") == run_digest(tmp_path / "whole" / "run")


def test_another_source_than_the_one_that_was_read_is_refused_until_it_is_said_what_it_is(
    base: tuple[Path, Path], tmp_path: Path
) -> None:
    """Names and offsets of one mean nothing in another: files of the same names were taken for read."""
    first = tmp_path / "first"
    second = tmp_path / "second"
    events = stream_events(90)
    drop_files(first, events[:30], events_a_file=30)
    drop_files(second, events[30:60], events_a_file=30)
    run = copied(*base, tmp_path)
    known = follow(str(first), run, BY_COUNT).trainer.state
    with pytest.raises(UserError, match=r"(?s)SOURCE.*second.*first.*--changed_source begin"):
        follow(str(second), run, BY_COUNT)
    assert DatasetCard.load(tmp_path / "data").generation == known.generation, "nothing was read or trained on"
    begun = {**BY_COUNT, "changed_source": "begin"}
    for _ in range(2):  # the same command again goes on where it stood
        assert follow(str(second), run, begun).trainer.state.windows_done == 2
    moved = second.rename(tmp_path / "third")
    drop_files(tmp_path / "more", events[60:], events_a_file=30)
    (tmp_path / "more" / "part-00000.jsonl").rename(moved / "part-00001.jsonl")
    with pytest.raises(UserError, match="is not what this data was fed from"):
        follow(str(moved), run, BY_COUNT)
    assert follow(str(moved), run, {**BY_COUNT, "changed_source": "moved"}).trainer.state.windows_done == 3
    states = [generation.stream for generation in DatasetCard.load(tmp_path / "data").generations]
    assert not any(states[:-1]), "names of all files, once for each generation"
    # Back at the first, which was left behind its only file.
    assert follow(str(first), run, begun).trainer.state.windows_done == 3
    with topic(events) as other, pytest.raises(UserError, match="is of another kind"):
        follow(other, run, {**BY_COUNT, "changed_source": "moved"})
    assert DatasetCard.load(tmp_path / "data").counts.events == DatasetCard.load(base[1]).counts.events + 90
