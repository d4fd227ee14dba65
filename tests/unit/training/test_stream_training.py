"""Stream training: after a crash at any point, results are bitwise identical. Real kills are in tests/faults."""

import itertools
import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nestrec.base.config_overrides import apply_overrides
from nestrec.base.config_values import parse_time_ms
from nestrec.base.errors import DataError
from nestrec.checkpoint import CheckpointManager, CheckpointSaveError
from nestrec.data.dataset import Dataset
from nestrec.data.dataset_card import DatasetCard
from nestrec.data.formats.format_registry import prepare
from nestrec.data.incremental.append import append
from nestrec.data.prepare.parse import AHEAD
from nestrec.data.prepare.prepare_options import LogColumns
from nestrec.data.samples.time_windows import split_runs_into_chunks
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
    copy_run,
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
WRONG_MS = parse_time_ms("2099-01-01", "time")


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
def test_stream_training_after_crashes_is_bitwise_identical(
    base: tuple[Path, Path], tmp_path: Path, kind: str, rule: dict[str, Any], points: tuple[str, ...]
) -> None:
    events = stream_events(100 if points == ALL else 70)
    with source_of(kind, tmp_path, events, events_per_file=31) as source:
        reference = copy_run(*base, tmp_path / "uninterrupted")
        num_windows = follow(source, reference, rule).trainer.state.windows_done
        assert num_windows >= 2
        cut = copy_run(*base, tmp_path / "cut")
        for point in points:
            with armed(point, crash, at=1), pytest.raises((Crash, CheckpointSaveError)):
                follow(source, cut, rule)
        follow(source, cut, rule)
    assert run_digest(cut) == run_digest(reference)
    cards = [DatasetCard.load(tmp_path / name / "data") for name in ("uninterrupted", "cut")]
    assert without_times(cards[0]) == without_times(cards[1])
    records = [load_run(run).windows for run in (reference, cut)]
    assert [record["window"] for record in records[0]] == list(range(num_windows))
    assert json.dumps(records[0]) == json.dumps(records[1])
    if rule is BY_COUNT:  # the last events wait until a window has thirty
        assert cards[0].counts.events - DatasetCard.load(base[1]).counts.events == len(events) // 30 * 30


def test_stream_windows_report_times_and_hold_each_event_once(base: tuple[Path, Path], tmp_path: Path) -> None:
    drop_files(tmp_path / "events", stream_events(50), events_per_file=17)
    run = copy_run(*base, tmp_path)
    ends: list[WindowEnd] = []
    follower = follow(str(tmp_path / "events"), run, {**BY_COUNT, "window.events": 25}, window_hooks=[ends.append])
    assert [end.number for end in ends] == [0, 1]
    assert sum(end.num_events for end in ends) == 50
    times_ms = Dataset.open(tmp_path / "data").newest_events()[2]
    assert (ends[-1].from_ms, ends[-1].to_ms) == (times_ms.min(), times_ms.max())
    trainer = follower.trainer
    num_chunks = len(split_runs_into_chunks(trainer.windows[0].runs, trainer.cfg.task.history.max_events))
    assert len(trainer.session.task.collator.tokens) == round(num_chunks / 0.8), "a fifth of the samples is replayed"
    for end in ends:
        assert end.first_at_s is not None
        assert end.read_at_s is not None
        assert end.closed_at_s is not None
        assert end.first_at_s <= end.read_at_s <= end.closed_at_s
    # The dataset equals one to which all files are appended at once.
    copy_run(*base, tmp_path / "at once")
    for number, path in enumerate(sorted((tmp_path / "events").iterdir())):
        append(path, tmp_path / "at once" / "data", format="log", overrides=COLUMNS)
        assert number < 4
    streamed, appended = (Dataset.open(tmp_path / name) for name in ("data", "at once/data"))
    assert streamed.all_user_keys() == appended.all_user_keys()
    assert streamed.items() == appended.items()
    for (_, a), (_, b) in itertools.zip_longest(streamed.scan(["item_ids"]), appended.scan(["item_ids"])):
        assert a.lists["item_ids"][0].tolist() == b.lists["item_ids"][0].tolist()
    # A second start without new events does not change the run.
    before = run_digest(run)
    follow(str(tmp_path / "events"), run, {**BY_COUNT, "window.events": 25})
    assert run_digest(run) == before


def test_stream_training_uses_only_new_events(base: tuple[Path, Path], tmp_path: Path) -> None:
    """Older events, including held-out ones, are only history unless they are replayed."""
    drop_files(tmp_path / "events", stream_events(30), events_per_file=30)
    run = copy_run(*base, tmp_path)
    task = follow(str(tmp_path / "events"), run, {**BY_COUNT, "replay_fraction": 0.0}).trainer.session.task
    user, position, _ = Dataset.open(tmp_path / "data").newest_events()
    slices = zip(task.collator._user.tolist(), task.collator._scored.tolist(), task.collator._end.tolist(), strict=True)
    trained = {(user_id, at) for user_id, scored, end in slices for at in range(scored, end)}
    assert trained == set(zip(user.tolist(), position.tolist(), strict=True))
    assert task.num_held_out("test") > 0


def test_stream_trained_run_uses_newest_weights_not_best_epoch(base: tuple[Path, Path], tmp_path: Path) -> None:
    """Regression test: publishing, exporting, evaluating and warm starts used the weights from before the stream."""
    run = copy_run(*base, tmp_path)
    before = max(CheckpointManager(run / "checkpoints").steps())
    shutil.copytree(run / "checkpoints", run / "best")
    drop_files(tmp_path / "events", stream_events(20), events_per_file=20)
    follow(str(tmp_path / "events"), run, BY_COUNT)  # too few events for a window
    with restored_session(run, best=True) as (_, step):
        assert step == before
    drop_files(tmp_path / "events", stream_events(40), events_per_file=20)
    state = follow(str(tmp_path / "events"), run, BY_COUNT).trainer.state
    assert state.step > before
    for best in (True, False):
        with restored_session(run, best=best) as (_, step):
            assert step == state.step
    with closing(Trainer(RunFolder(run).config(), run, Topology.single())) as trainer:
        assert trainer.checkpointer.restore_best()[0].step == state.step
        assert WarmStart.of(run, trainer.session).load(trainer.session, print)[0].step == state.step


def test_stream_training_resumes_from_the_checkpoint_mirror(base: tuple[Path, Path], tmp_path: Path) -> None:
    run = copy_run(*base, tmp_path)
    config = json.loads((run / "config.json").read_text())
    config["training"]["checkpoint_mirror"] = str(tmp_path / "there")
    (run / "config.json").write_text(json.dumps(config))
    shutil.copytree(run / "checkpoints", tmp_path / "there" / "checkpoints")
    drop_files(tmp_path / "events", stream_events(80), events_per_file=20)
    follow(str(tmp_path / "events"), run, BY_COUNT)
    before = run_digest(run)
    shutil.rmtree(run / "checkpoints")
    follower = follow(str(tmp_path / "events"), run, BY_COUNT)
    assert follower.trainer.state.generation == 2
    assert run_digest(run) == before


def test_stream_event_of_a_wrong_clock_is_quarantined(base: tuple[Path, Path], tmp_path: Path) -> None:
    """Regression test: such an event closed all later windows immediately."""
    events = stream_events(100)
    wrong = [*events[:20], {**events[20], "time_ms": WRONG_MS}, *events[20:]]
    warnings: list[str] = []

    class WarningRecorder(TrainingCallback):
        def on_warning(self, message: str) -> None:
            warnings.append(message)

    for name, stream in (("right", events), ("wrong", wrong)):
        drop_files(tmp_path / name / "events", stream, events_per_file=200)
        follow(str(tmp_path / name / "events"), copy_run(*base, tmp_path / name), BY_TIME, callback=WarningRecorder())
    assert run_digest(tmp_path / "wrong" / "run") == run_digest(tmp_path / "right" / "run")
    card = DatasetCard.load(tmp_path / "wrong" / "data")
    assert card.counts.quarantined == {AHEAD: 1}
    assert card.generations[-1].last_ms < WRONG_MS
    assert AHEAD in (tmp_path / "wrong" / "data" / "quarantine" / "000001.csv").read_text()
    first, counted = (text for text in warnings if AHEAD in text)
    assert "part-00000.jsonl, line 21" in first
    assert "1 rejected rows are in quarantine/000001.csv" in counted


def test_stream_log_option_changes_only_that_option(tmp_path: Path) -> None:
    """Regression test: one option reset all others to their defaults, so the columns of the dataset were not found."""
    (tmp_path / "log.csv").write_text("who,what\na,b\n")
    prepare("log", tmp_path / "log.csv", tmp_path / "data", log=LogColumns(user="who", item="what"))
    options = stream_config(tmp_path / "data", {"log.max_future_s": "600", "stop_after_idle_s": "1"})
    assert options == StreamConfig(log=LogColumns(user="who", item="what", max_future_s=600.0), stop_after_idle_s=1.0)
    prepare("synthetic", "tiny", tmp_path / "made", num_users=20)
    assert stream_config(tmp_path / "made", {}).log is None


@pytest.mark.parametrize("rule", [BY_COUNT, BY_TIME])
@pytest.mark.parametrize("bad", ['{"who": 1}', "{not JSON"])
def test_stream_bad_rows_are_quarantined_and_training_continues(
    base: tuple[Path, Path], tmp_path: Path, rule: dict[str, Any], bad: str
) -> None:
    folder = tmp_path / "events"
    events = stream_events(70)
    drop_files(folder, events, events_per_file=70)
    (folder / "first.jsonl").write_text(f"{bad}\n" * 30)  # first by name, and as long as a window
    (folder / "z.jsonl").write_text(f"{bad}\n" * 5)
    run = copy_run(*base, tmp_path)
    follower = follow(str(folder), run, rule)
    card = DatasetCard.load(tmp_path / "data")
    assert follower.trainer.state.windows_done >= 2
    assert sum(card.counts.quarantined.values()) >= 30


class MessageRecorder(TrainingCallback):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def on_message(self, message: str) -> None:
        self.notes.append(message)

    def on_warning(self, message: str) -> None:
        self.warnings.append(message)


def test_stream_training_reports_events_waiting_for_a_window(base: tuple[Path, Path], tmp_path: Path) -> None:
    run = copy_run(*base, tmp_path)
    drop_files(tmp_path / "events", stream_events(70), events_per_file=50)
    recorder = MessageRecorder()
    follower = follow(str(tmp_path / "events"), run, BY_COUNT, callback=recorder)
    assert follower.untrained_message.startswith(
        "10 events of the stream not trained on, because a window closes after 30 events"
    )
    [first, second] = [note for note in recorder.notes if note.startswith("generation")]
    assert "waiting: 2 files" in first
    assert "waiting: 1 file, " in second
    drop_files(tmp_path / "events", stream_events(90), events_per_file=50)
    shutil.rmtree(tmp_path / "events")
    drop_files(tmp_path / "more", stream_events(30, seed=1), events_per_file=50)
    done = follow(str(tmp_path / "more"), run, {**BY_COUNT, "on_source_change": "restart"})
    assert done.untrained_message == ""


def test_stream_training_changes_no_option_of_the_run(tiny_data: Path, tmp_path: Path) -> None:
    more = {"training.max_steps": 3, "training.epochs": 1, "training.early_stopping_patience": 2}
    folder = tmp_path / "first"
    Trainer(config_of("ranking", tiny_data, more), folder, Topology.single()).train()
    run = copy_run(folder, tiny_data / "sequences", tmp_path)
    before = RunFolder(run).config()
    assert before.training.eval_every_epochs == 1
    drop_files(tmp_path / "events", stream_events(40), events_per_file=40)
    for _ in range(2):
        recorder = MessageRecorder()
        follow(str(tmp_path / "events"), run, BY_COUNT, callback=recorder)
        assert [text for text in recorder.warnings if "changed" in text] == []
    assert RunFolder(run).config() == before


def test_stream_publishing_reports_each_version(base: tuple[Path, Path], tmp_path: Path) -> None:
    run = copy_run(*base, tmp_path)
    drop_files(tmp_path / "events", stream_events(60), events_per_file=60)
    cfg = apply_overrides(RunFolder(run).config(), {"publish.address": str(tmp_path / "published")})
    recorder = MessageRecorder()
    state = follow(str(tmp_path / "events"), run, BY_COUNT, cfg=cfg, callback=recorder).trainer.state
    published = [note for note in recorder.notes if note.startswith("published version ")]
    assert len(published) == 2
    assert f" of step {state.step} to {tmp_path / 'published'}: " in published[-1]


def test_stream_new_items_get_features_from_a_table(base: tuple[Path, Path], tmp_path: Path) -> None:
    run = copy_run(*base, tmp_path)
    events = [{**event, "item": f"new {i % 3}"} for i, event in enumerate(stream_events(60))]
    drop_files(tmp_path / "events", events[:30], events_per_file=60)
    recorder = MessageRecorder()
    follow(str(tmp_path / "events"), run, BY_COUNT, callback=recorder)
    [warning] = [text for text in recorder.warnings if "have no features" in text]
    assert "3 of 3 new items have no features (topic)" in warning
    (tmp_path / "items.csv").write_text("item,topic\nnew 7,0\n")
    for event in events[30:]:
        event["item"] = "new 7"
    drop_files(tmp_path / "more", events[30:], events_per_file=60)
    recorder = MessageRecorder()
    options = {**BY_COUNT, "on_source_change": "restart", "items": str(tmp_path / "items.csv")}
    follow(str(tmp_path / "more"), run, options, callback=recorder)
    assert [text for text in recorder.warnings if "have no features" in text] == []
    items = Dataset.open(tmp_path / "data").items().to_pylist()
    topics = {item["item_key"]: item["item_topic"] for item in items}
    assert topics["new 0"] == 0
    assert topics["new 7"] > 0


def test_stream_training_rejects_a_missing_item_table(base: tuple[Path, Path], tmp_path: Path) -> None:
    run = copy_run(*base, tmp_path)
    drop_files(tmp_path / "events", stream_events(30), events_per_file=60)
    before = run_digest(run)
    with pytest.raises(DataError, match=r"nothing.csv"):
        follow(str(tmp_path / "events"), run, {**BY_COUNT, "items": str(tmp_path / "nothing.csv")})
    assert run_digest(run) == before
