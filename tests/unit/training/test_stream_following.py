"""Runs that follow a stream: cut short at any place, they come to the same bits. Real kills are in tests/faults."""

import itertools
import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nestrec.base.config_overrides import with_overrides
from nestrec.base.config_values import moment_ms
from nestrec.base.errors import DataError
from nestrec.checkpoint import CheckpointManager, CheckpointSaveError
from nestrec.data.dataset import Dataset
from nestrec.data.dataset_card import DatasetCard
from nestrec.data.formats.format_registry import prepare
from nestrec.data.incremental.append import append
from nestrec.data.prepare.parse import AHEAD
from nestrec.data.prepare.prepare_options import LogColumns
from nestrec.data.samples.time_windows import slices_of_runs
from nestrec.distributed import Topology
from nestrec.exporters.servable_writer import restored_session
from nestrec.report.run_records import load_run
from nestrec.training.callbacks import TrainingCallback
from nestrec.training.run_folder import RunFolder
from nestrec.training.state import run_digest
from nestrec.training.stream_trainer import StreamConfig, stream_config
from nestrec.training.trainer import Trainer
from nestrec.training.training_session import WindowEnd
from nestrec.training.warm_start import WarmStart
from support.fail_points import armed
from support.stream_fixtures import (
    BY_COUNT,
    BY_TIME,
    COLUMNS,
    Crash,
    copied,
    crash,
    drop_files,
    follow,
    source_of,
    stream_events,
    without_times,
)
from support.tiny_runs import config_of

FEW = ("data.append.before_card", "train.step", "follow.window")
ALL = ("stream.read", "data.append.before_layer", *FEW, "data.append.after_card", "checkpoint.before_rename")
WRONG_MS = moment_ms("2099-01-01", "time")


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
            with armed(point, crash, at=1), pytest.raises((Crash, CheckpointSaveError)):
                follow(source, cut, rule)
        follow(source, cut, rule)
    assert run_digest(cut) == run_digest(whole)
    cards = [DatasetCard.load(tmp_path / name / "data") for name in ("whole", "cut")]
    assert without_times(cards[0]) == without_times(cards[1])
    told = [load_run(run).windows for run in (whole, cut)]
    assert [record["window"] for record in told[0]] == list(range(num_windows))
    assert json.dumps(told[0]) == json.dumps(told[1])
    if rule is BY_COUNT:  # the last ones wait for a window of thirty
        assert cards[0].counts.events - DatasetCard.load(base[1]).counts.events == len(events) // 30 * 30


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


def test_follow_trains_on_the_events_that_came(base: tuple[Path, Path], tmp_path: Path) -> None:
    """Events of the data before it, those held out among them, are history alone unless they are replayed."""
    drop_files(tmp_path / "events", stream_events(30), events_a_file=30)
    run = copied(*base, tmp_path)
    task = follow(str(tmp_path / "events"), run, {**BY_COUNT, "replay_share": 0.0}).trainer.session.task
    user, position, _ = Dataset.open(tmp_path / "data").newest_events()
    slices = zip(
        task.assembler._user.tolist(), task.assembler._scored.tolist(), task.assembler._end.tolist(), strict=True
    )
    trained = {(user_id, at) for user_id, scored, end in slices for at in range(scored, end)}
    assert trained == set(zip(user.tolist(), position.tolist(), strict=True))
    assert task.num_held_out("test") > 0


def test_a_run_that_has_followed_is_used_as_it_is_now_and_not_as_it_was_at_its_best_epoch(
    base: tuple[Path, Path], tmp_path: Path
) -> None:
    """It was published, exported, measured and gone on from as it was before it followed."""
    run = copied(*base, tmp_path)
    before = max(CheckpointManager(run / "checkpoints").steps())
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
        assert trainer.saving.restore_best()[0].step == state.step
        assert WarmStart.of(run, trainer.session).load(trainer.session, print)[0].step == state.step


def test_follow_resumes_from_the_checkpoint_address(base: tuple[Path, Path], tmp_path: Path) -> None:
    run = copied(*base, tmp_path)
    config = json.loads((run / "config.json").read_text())
    config["training"]["checkpoint_address"] = str(tmp_path / "there")
    (run / "config.json").write_text(json.dumps(config))
    shutil.copytree(run / "checkpoints", tmp_path / "there" / "checkpoints")
    drop_files(tmp_path / "events", stream_events(80), events_a_file=20)
    follow(str(tmp_path / "events"), run, BY_COUNT)
    before = run_digest(run)
    shutil.rmtree(run / "checkpoints")
    follower = follow(str(tmp_path / "events"), run, BY_COUNT)
    assert follower.trainer.state.generation == 2
    assert run_digest(run) == before


def test_one_event_of_a_wrong_clock_is_set_aside_and_told_of(base: tuple[Path, Path], tmp_path: Path) -> None:
    """It closed every window from then on."""
    events = stream_events(100)
    wrong = [*events[:20], {**events[20], "time_ms": WRONG_MS}, *events[20:]]
    told: list[str] = []

    class Heard(TrainingCallback):
        def warned(self, message: str) -> None:
            told.append(message)

    for name, given in (("right", events), ("wrong", wrong)):
        drop_files(tmp_path / name / "events", given, events_a_file=200)
        follow(str(tmp_path / name / "events"), copied(*base, tmp_path / name), BY_TIME, listener=Heard())
    assert run_digest(tmp_path / "wrong" / "run") == run_digest(tmp_path / "right" / "run")
    card = DatasetCard.load(tmp_path / "wrong" / "data")
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


@pytest.mark.parametrize("rule", [BY_COUNT, BY_TIME])
@pytest.mark.parametrize("bad", ['{"who": 1}', "{not JSON"])
def test_bad_rows_alone_are_set_aside_and_what_comes_after_them_is_trained_on(
    base: tuple[Path, Path], tmp_path: Path, rule: dict[str, Any], bad: str
) -> None:
    folder = tmp_path / "events"
    events = stream_events(70)
    drop_files(folder, events, events_a_file=70)
    (folder / "first.jsonl").write_text(f"{bad}\n" * 30)  # before the others by name, and a window of its own
    (folder / "z.jsonl").write_text(f"{bad}\n" * 5)
    run = copied(*base, tmp_path)
    follower = follow(str(folder), run, rule)
    card = DatasetCard.load(tmp_path / "data")
    assert follower.trainer.state.windows_done >= 2
    assert sum(card.counts.quarantined.values()) >= 30


class _Heard(TrainingCallback):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def noted(self, message: str) -> None:
        self.notes.append(message)

    def warned(self, message: str) -> None:
        self.warnings.append(message)


def test_follow_names_events_that_wait_for_a_window(base: tuple[Path, Path], tmp_path: Path) -> None:
    run = copied(*base, tmp_path)
    drop_files(tmp_path / "events", stream_events(70), events_a_file=50)
    heard = _Heard()
    follower = follow(str(tmp_path / "events"), run, BY_COUNT, listener=heard)
    assert follower.untrained.startswith("10 events of the stream not trained on: a window closes after 30 events")
    [first, second] = [note for note in heard.notes if note.startswith("generation")]
    assert "waiting: 2 files" in first
    assert "waiting: 1 file, " in second
    drop_files(tmp_path / "events", stream_events(90), events_a_file=50)
    shutil.rmtree(tmp_path / "events")
    drop_files(tmp_path / "more", stream_events(30, seed=1), events_a_file=50)
    done = follow(str(tmp_path / "more"), run, {**BY_COUNT, "changed_source": "begin"})
    assert done.untrained == ""


def test_follow_changes_no_option_of_the_run(tiny_data: Path, tmp_path: Path) -> None:
    more = {"training.max_steps": 3, "training.epochs": 1, "training.patience": 2}
    folder = tmp_path / "first"
    Trainer(config_of("ranking", tiny_data, more), folder, Topology.single()).train()
    run = copied(folder, tiny_data / "sequences", tmp_path)
    before = RunFolder(run).config()
    assert before.training.evaluate_every_epochs == 1
    drop_files(tmp_path / "events", stream_events(40), events_a_file=40)
    for _ in range(2):
        heard = _Heard()
        follow(str(tmp_path / "events"), run, BY_COUNT, listener=heard)
        assert [text for text in heard.warnings if "changed" in text] == []
    assert RunFolder(run).config() == before


def test_publishing_reports_each_version(base: tuple[Path, Path], tmp_path: Path) -> None:
    run = copied(*base, tmp_path)
    drop_files(tmp_path / "events", stream_events(60), events_a_file=60)
    cfg = with_overrides(RunFolder(run).config(), {"publish.address": str(tmp_path / "published")})
    heard = _Heard()
    state = follow(str(tmp_path / "events"), run, BY_COUNT, cfg=cfg, listener=heard).trainer.state
    published = [note for note in heard.notes if note.startswith("published version ")]
    assert len(published) == 2
    assert f" of step {state.step} to {tmp_path / 'published'}: " in published[-1]


def test_new_items_get_features_from_a_table(base: tuple[Path, Path], tmp_path: Path) -> None:
    run = copied(*base, tmp_path)
    events = [{**event, "item": f"new {i % 3}"} for i, event in enumerate(stream_events(60))]
    drop_files(tmp_path / "events", events[:30], events_a_file=60)
    heard = _Heard()
    follow(str(tmp_path / "events"), run, BY_COUNT, listener=heard)
    [warning] = [text for text in heard.warnings if "without features" in text]
    assert "3 of 3 new items came without features (topic)" in warning
    (tmp_path / "items.csv").write_text("item,topic\nnew 7,0\n")
    for event in events[30:]:
        event["item"] = "new 7"
    drop_files(tmp_path / "more", events[30:], events_a_file=60)
    heard = _Heard()
    options = {**BY_COUNT, "changed_source": "begin", "items": str(tmp_path / "items.csv")}
    follow(str(tmp_path / "more"), run, options, listener=heard)
    assert [text for text in heard.warnings if "without features" in text] == []
    items = Dataset.open(tmp_path / "data").items().to_pylist()
    topics = {item["item_key"]: item["item_topic"] for item in items}
    assert topics["new 0"] == 0
    assert topics["new 7"] > 0


def test_follow_refuses_a_missing_table_of_items(base: tuple[Path, Path], tmp_path: Path) -> None:
    run = copied(*base, tmp_path)
    drop_files(tmp_path / "events", stream_events(30), events_a_file=60)
    before = run_digest(run)
    with pytest.raises(DataError, match=r"nothing.csv"):
        follow(str(tmp_path / "events"), run, {**BY_COUNT, "items": str(tmp_path / "nothing.csv")})
    assert run_digest(run) == before
