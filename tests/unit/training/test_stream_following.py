"""Runs that follow a stream: cut short at any place, they come to the same bits. Real kills are in tests/faults."""

import gzip
import itertools
import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import confluent_kafka
import pytest

from nestrec.base.errors import DataError, UserError
from nestrec.base.failpoints import armed
from nestrec.base.moments import moment_ms
from nestrec.checkpoint import Checkpoints, SaveError
from nestrec.data.card import Card
from nestrec.data.dataset import Dataset
from nestrec.data.growth.append import append
from nestrec.data.growth.generations import growing, restore
from nestrec.data.prepare.options import LogColumns
from nestrec.data.prepare.parse import AHEAD
from nestrec.data.prepare.preparation import prepare
from nestrec.data.samples.windows import slices_of_runs
from nestrec.data.sources.folder import FolderSource
from nestrec.data.sources.kafka import KafkaSource
from nestrec.data.sources.source import open_source
from nestrec.distributed import Topology
from nestrec.report.run_folder import load_run
from nestrec.serving.model.export import restored_session
from nestrec.testing.streams import COLUMNS, copied, drop_files, follow_options, source_of, stream_events, topic
from nestrec.testing.tiny_runs import config_of
from nestrec.training.beginning import Beginning
from nestrec.training.following import StreamConfig, StreamFollower, stream_config
from nestrec.training.listener import Listener
from nestrec.training.run_digest import run_digest
from nestrec.training.run_folder import RunFolder
from nestrec.training.trainer import Trainer
from nestrec.training.windows import WindowEnd

BY_COUNT = {"window.events": 30, "idle_s": 0.01, "replay_share": 0.2}
WRONG_MS = moment_ms("2099-01-01", "time")
BY_TIME = {"window.events": "none", "window.hours": 0.01, "window.lateness_s": 20, "idle_s": 0.01}


class Crash(Exception):
    pass


def crash() -> None:
    raise Crash


@pytest.fixture(scope="module")
def base(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run, and its data."""
    run = tmp_path_factory.mktemp("base") / "run"
    more = {"training.max_steps": 3, "training.evaluate_every_epochs": 0}
    Trainer(config_of("ranking", tiny_data, more), run, Topology.single()).train()
    return run, tiny_data / "sequences"


def follow(source: str, run: Path, options: dict[str, Any], **given: Any) -> StreamFollower:
    follower = StreamFollower(source, run, Topology.single(), follow_options(options), **given)
    follower.follow()
    return follower


def without_times(card: Card) -> list[Any]:
    return [(g.number, g.digest, g.events, g.stream.get("position")) for g in card.generations]


FEW = ("data.append.before_card", "train.step", "follow.window")
ALL = ("stream.read", "data.append.before_layer", *FEW, "data.append.after_card", "checkpoint.before_rename")


@pytest.mark.parametrize(
    ("kind", "rule", "points"),
    [
        ("folder", BY_TIME, FEW),
        ("kafka", BY_COUNT, FEW[1:]),
        *(
            pytest.param(kind, rule, ALL, marks=[pytest.mark.slow, pytest.mark.timeout(600)])
            for kind in ("folder", "kafka")
            for rule in (BY_COUNT, BY_TIME)
        ),
    ],
)
def test_a_run_cut_short_anywhere_comes_to_the_same_bits(
    base: tuple[Path, Path], tmp_path: Path, kind: str, rule: dict[str, Any], points: tuple[str, ...]
) -> None:
    events = stream_events(100 if points == ALL else 70)
    with source_of(kind, tmp_path, events, events_a_file=31) as source:
        whole = copied(*base, tmp_path / "whole")
        num_windows = follow(source, whole, rule).trainer.state.windows_done
        assert num_windows >= 2
        cut = copied(*base, tmp_path / "cut")
        for point in points:
            with armed(point, crash, at=1), pytest.raises((Crash, SaveError)):
                follow(source, cut, rule)
        follow(source, cut, rule)
    assert run_digest(cut) == run_digest(whole)
    cards = [Card.load(tmp_path / name / "data") for name in ("whole", "cut")]
    assert without_times(cards[0]) == without_times(cards[1])
    told = [load_run(run).windows for run in (whole, cut)]
    assert [record["window"] for record in told[0]] == list(range(num_windows))
    assert json.dumps(told[0]) == json.dumps(told[1])
    if rule is BY_COUNT:  # the last ones wait for a window of thirty
        assert cards[0].counts.events - Card.load(base[1]).counts.events == len(events) // 30 * 30


def test_windows_of_a_stream_are_told_with_their_times_and_hold_every_event_once(
    base: tuple[Path, Path], tmp_path: Path
) -> None:
    drop_files(tmp_path / "events", stream_events(50), events_a_file=17)
    run = copied(*base, tmp_path)
    told: list[WindowEnd] = []
    follower = follow(str(tmp_path / "events"), run, {**BY_COUNT, "window.events": 25}, window_hooks=[told.append])
    assert [end.number for end in told] == [0, 1]
    assert sum(end.num_events for end in told) == 50
    times_ms = Dataset.open(tmp_path / "data").newest_events()[2]
    assert (told[-1].from_ms, told[-1].to_ms) == (times_ms.min(), times_ms.max())
    trainer = follower.trainer
    num_own = len(slices_of_runs(trainer.windows[0].runs, trainer.cfg.task.inputs.max_events))
    assert len(trainer.session.task.assembler.tokens) == round(num_own / 0.8), "a fifth of the samples is replayed"
    for end in told:
        assert end.first_at_s is not None
        assert end.read_at_s is not None
        assert end.closed_at_s is not None
        assert end.first_at_s <= end.read_at_s <= end.closed_at_s
    # The same as if the files had been appended at once.
    copied(*base, tmp_path / "at once")
    for number, path in enumerate(sorted((tmp_path / "events").iterdir())):
        append(path, tmp_path / "at once" / "data", format="log", overrides=COLUMNS)
        assert number < 4
    mine, theirs = (Dataset.open(tmp_path / name) for name in ("data", "at once/data"))
    assert mine.all_user_keys() == theirs.all_user_keys()
    assert mine.items() == theirs.items()
    for (_, a), (_, b) in itertools.zip_longest(mine.scan(["item_ids"]), theirs.scan(["item_ids"])):
        assert a.lists["item_ids"][0].tolist() == b.lists["item_ids"][0].tolist()
    # Started again with nothing new, it stands where it stood; its data may be measured.
    before = run_digest(run)
    follow(str(tmp_path / "events"), run, {**BY_COUNT, "window.events": 25})
    assert run_digest(run) == before


def test_a_run_that_has_followed_is_used_as_it_is_now_and_not_as_it_was_at_its_best_epoch(
    base: tuple[Path, Path], tmp_path: Path
) -> None:
    """It was published, exported, measured and gone on from as it was before it followed."""
    run = copied(*base, tmp_path)
    before = max(Checkpoints(run / "checkpoints").steps())
    shutil.copytree(run / "checkpoints", run / "best")
    drop_files(tmp_path / "events", stream_events(20), events_a_file=20)
    follow(str(tmp_path / "events"), run, BY_COUNT)  # too few for a window
    with restored_session(run, best=True) as (_, step):
        assert step == before
    drop_files(tmp_path / "events", stream_events(40), events_a_file=20)
    state = follow(str(tmp_path / "events"), run, BY_COUNT).trainer.state
    assert state.step > before
    for best in (True, False):
        with restored_session(run, best=best) as (_, step):
            assert step == state.step
    with closing(Trainer(RunFolder(run).config(), run, Topology.single())) as trainer:
        assert trainer.saving.restore_best().step == state.step
        assert Beginning.of(run, trainer.session).load(trainer.session, print)[0].step == state.step


def test_questions_to_brokers_do_not_wait_for_a_fetch_that_finds_nothing() -> None:
    wanted = tuple(stream_events(1)[0])
    with topic(stream_events(60)) as address:
        source = KafkaSource(f"{address}?fetch.wait.max.ms=30000", wanted)
        position, number = {}, 0
        while (rows := source.read(position, 5)) is not None:  # of those who fetch, three wait by then
            position, number = rows.position, number + rows.batch.num_rows
            assert source.lag(position) == {"messages": 60.0 - number}
        source.close()
    assert number == 60


def test_two_runs_that_follow_into_one_data_read_every_event_once(base: tuple[Path, Path], tmp_path: Path) -> None:
    """Each trains on every window, whoever has appended it; both appended it, and every event was there twice."""
    drop_files(tmp_path / "events", stream_events(70), events_a_file=70)
    runs = [copied(*base, tmp_path / "a"), tmp_path / "b"]
    shutil.copytree(runs[0], runs[1])
    source, states = str(tmp_path / "events"), []

    def overtake() -> None:
        states.append(follow(source, runs[1], BY_COUNT).trainer.state)

    with armed("stream.read", overtake, at=1):
        states.append(follow(source, runs[0], BY_COUNT).trainer.state)
    assert [(state.windows_done, state.generation) for state in states] == [(2, 2), (2, 2)]
    assert run_digest(runs[0]) == run_digest(runs[1])
    assert Card.load(tmp_path / "a" / "data").counts.events == Card.load(base[1]).counts.events + 60


def test_what_is_appended_while_a_window_is_read_is_trained_on_before_it(
    base: tuple[Path, Path], tmp_path: Path
) -> None:
    events = stream_events(65)
    drop_files(tmp_path / "events", events[:30], events_a_file=30)
    drop_files(tmp_path / "more", events[30:], events_a_file=35)
    run, told = copied(*base, tmp_path), list[int]()
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
                with armed(point, crash, at=2), pytest.raises((Crash, SaveError)):
                    follow(source, run, {**BY_COUNT, "window.events": 25}, window_hooks=[add])
            state = follow(source, run, {**BY_COUNT, "window.events": 25}, window_hooks=[add]).trainer.state
            assert state.windows_done == 4
    cards = [Card.load(tmp_path / name / "data") for name in ("whole", "cut")]
    assert cards[0].generations[-1].stream["position"]["offsets"] == {f"{partition}": 25 for partition in range(4)}
    assert without_times(cards[0]) == without_times(cards[1])
    assert run_digest(tmp_path / "cut" / "run") == run_digest(tmp_path / "whole" / "run")


def test_another_source_than_the_one_that_was_read_is_refused_until_it_is_said_what_it_is(
    base: tuple[Path, Path], tmp_path: Path
) -> None:
    """Names and offsets of one mean nothing in another: files of the same names were taken for read."""
    first, second, events = tmp_path / "first", tmp_path / "second", stream_events(90)
    drop_files(first, events[:30], events_a_file=30)
    drop_files(second, events[30:60], events_a_file=30)
    run = copied(*base, tmp_path)
    known = follow(str(first), run, BY_COUNT).trainer.state
    with pytest.raises(UserError, match=r"(?s)SOURCE.*second.*first.*--changed_source begin"):
        follow(str(second), run, BY_COUNT)
    assert Card.load(tmp_path / "data").generation == known.generation, "nothing was read or trained on"
    begun = {**BY_COUNT, "changed_source": "begin"}
    for _ in range(2):  # the same command again goes on where it stood
        assert follow(str(second), run, begun).trainer.state.windows_done == 2
    moved = second.rename(tmp_path / "third")
    drop_files(tmp_path / "more", events[60:], events_a_file=30)
    (tmp_path / "more" / "part-00000.jsonl").rename(moved / "part-00001.jsonl")
    with pytest.raises(UserError, match="is not what this data was fed from"):
        follow(str(moved), run, BY_COUNT)
    assert follow(str(moved), run, {**BY_COUNT, "changed_source": "moved"}).trainer.state.windows_done == 3
    states = [generation.stream for generation in Card.load(tmp_path / "data").generations]
    assert not any(states[:-1]), "names of all files, once for each generation"
    # Back at the first, which was left behind its only file.
    assert follow(str(first), run, begun).trainer.state.windows_done == 3
    with topic(events) as other, pytest.raises(UserError, match="is of another kind"):
        follow(other, run, {**BY_COUNT, "changed_source": "moved"})
    assert Card.load(tmp_path / "data").counts.events == Card.load(base[1]).counts.events + 90


def test_one_event_of_a_wrong_clock_is_set_aside_and_told_of(base: tuple[Path, Path], tmp_path: Path) -> None:
    """It closed every window from then on."""
    events = stream_events(100)
    wrong = [*events[:20], {**events[20], "time_ms": WRONG_MS}, *events[20:]]
    told: list[str] = []

    class Heard(Listener):
        def warned(self, message: str) -> None:
            told.append(message)

    for name, given in (("right", events), ("wrong", wrong)):
        drop_files(tmp_path / name / "events", given, events_a_file=200)
        follow(str(tmp_path / name / "events"), copied(*base, tmp_path / name), BY_TIME, listener=Heard())
    assert run_digest(tmp_path / "wrong" / "run") == run_digest(tmp_path / "right" / "run")
    card = Card.load(tmp_path / "wrong" / "data")
    assert card.counts.quarantined == {AHEAD: 1}
    assert card.generations[-1].last_ms < WRONG_MS
    assert AHEAD in (tmp_path / "wrong" / "data" / "quarantine" / "000001.csv").read_text()
    first, counted = (text for text in told if AHEAD in text)
    assert "part-00000.jsonl, line 21" in first
    assert "1 bad rows are set aside in quarantine/000001.csv" in counted


def test_an_option_of_the_log_changes_that_and_nothing_else(tmp_path: Path) -> None:
    """One alone gave all others their defaults, and the columns of the data were found in no event."""
    (tmp_path / "log.csv").write_text("who,what\na,b\n")
    prepare("log", tmp_path / "log.csv", tmp_path / "data", log=LogColumns(user="who", item="what"))
    options = stream_config(tmp_path / "data", {"log.max_ahead_s": "600", "idle_s": "1"})
    assert options == StreamConfig(log=LogColumns(user="who", item="what", max_ahead_s=600.0), idle_s=1.0)
    prepare("synthetic", "tiny", tmp_path / "made", num_users=20)
    assert stream_config(tmp_path / "made", {}).log is None


def test_files_that_are_taken_away_before_they_were_read_are_told_of(tmp_path: Path) -> None:
    folder, wanted = tmp_path / "events", tuple(stream_events(1)[0])
    drop_files(folder, stream_events(4), events_a_file=2)
    source = FolderSource(folder, LogColumns(), wanted)
    first = source.read({}, 1)
    assert first is not None
    (folder / "part-00000.jsonl").unlink()
    with pytest.raises(UserError, match=r"(?s)part-00000.jsonl.*cannot be read"):
        source.read(first.position, 1)
    shutil.rmtree(folder)
    with pytest.raises(UserError, match="cannot be read"):
        source.read({}, 1)


def test_a_file_that_changes_after_it_was_read_is_told_of(tmp_path: Path) -> None:
    """What is written behind its end would never be read; of a shorter one, rows would be skipped."""
    folder, wanted = tmp_path / "events", tuple(stream_events(1)[0])
    drop_files(folder, stream_events(40), events_a_file=20)
    (folder / "part-00001.jsonl").rename(tmp_path / "later.jsonl")
    file = folder / "part-00000.jsonl"
    whole = file.read_text()
    source = FolderSource(folder, LogColumns(), wanted)
    half, all_of_it = source.read({}, 12), source.read({}, 20)
    assert half is not None
    assert all_of_it is not None
    assert "file" not in all_of_it.position, "who waits for more would read it again at every look"
    for text in (whole + whole.splitlines()[0] + "\n", whole[: len(whole) // 4]):
        file.write_text(text)
        for rows in (half, all_of_it):
            with pytest.raises(UserError, match=r"(?s)part-00000.jsonl.*bytes when it was read.*must appear whole"):
                FolderSource(folder, LogColumns(), wanted).read(rows.position, 20)
    # Packed or taken away when it has been read, it is what it was; the next file comes.
    file.unlink()
    with gzip.open(folder / "part-00000.jsonl.gz", "wt") as packed:
        packed.write(whole)
    (tmp_path / "later.jsonl").rename(folder / "part-00001.jsonl")
    rest = source.read(all_of_it.position, 30)
    assert rest is not None
    assert (rest.batch.file, rest.batch.num_rows) == ("part-00001.jsonl", 20)
    assert source.read(rest.position, 30) is None


def test_a_file_that_is_not_whole_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "half.jsonl.gz").write_bytes(gzip.compress(b'{"user": 1}\n' * 999)[:-20])
    with pytest.raises(DataError, match=r"(?s)half.jsonl.gz.*must appear whole.*goes on where it stood"):
        FolderSource(tmp_path, LogColumns(), ("user",)).read({}, 5)


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("{}/nothing", "no folder that there is"),
        ("{}/file.csv", "it is a file"),
        ("kafka://localhost:9092", "names no brokers or no topic"),
        ("kafka:///events", "names no brokers or no topic"),
    ],
)
def test_what_is_no_source_is_refused_with_the_reason(tmp_path: Path, address: str, problem: str) -> None:
    (tmp_path / "file.csv").touch()
    with pytest.raises(UserError, match=problem):
        open_source(address.format(tmp_path), LogColumns())


def test_a_topic_that_ends_before_what_was_read_is_not_waited_for() -> None:
    """It was made anew under its name: nothing would come until it is as long as the one before."""
    wanted = tuple(stream_events(1)[0])
    with topic(stream_events(3), partitions=1) as address:
        source = KafkaSource(address, wanted)
        assert source.read({"offsets": {"0": 3}}, 5) is None
        with pytest.raises(UserError, match="ends at 3 in partition 0, where 4 was read"):
            source.read({"offsets": {"0": 4}}, 5)
        source.close()


def test_a_message_without_a_value_is_a_bad_row() -> None:
    wanted = tuple(stream_events(1)[0])
    with topic(stream_events(3), partitions=1) as address:
        producer = confluent_kafka.Producer({"bootstrap.servers": urlsplit(address).netloc})
        producer.produce("events", None, key=b"of an event", partition=0)
        assert producer.flush(20) == 0
        source = KafkaSource(address, wanted)
        rows = source.read({}, 10)
        source.close()
    assert rows is not None
    assert rows.batch.num_rows == 3
    assert len(rows.batch.bad) == 1
    assert rows.position["offsets"] == {"0": 4}


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


@pytest.mark.parametrize("rule", [BY_COUNT, BY_TIME])
@pytest.mark.parametrize("bad", ['{"who": 1}', "{not JSON"])
def test_bad_rows_alone_are_set_aside_and_what_comes_after_them_is_trained_on(
    base: tuple[Path, Path], tmp_path: Path, rule: dict[str, Any], bad: str
) -> None:
    folder, events = tmp_path / "events", stream_events(70)
    drop_files(folder, events, events_a_file=70)
    (folder / "first.jsonl").write_text(f"{bad}\n" * 30)  # before the others by name, and a window of its own
    (folder / "z.jsonl").write_text(f"{bad}\n" * 5)
    run = copied(*base, tmp_path)
    follower = follow(str(folder), run, rule)
    card = Card.load(tmp_path / "data")
    assert follower.trainer.state.windows_done >= 2
    assert sum(card.counts.quarantined.values()) >= 30
