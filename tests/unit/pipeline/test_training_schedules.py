"""The training loop under each schedule: the same run to the bit, through evaluations, saves, stops and resumes."""

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from nestrec.base.errors import UserError
from nestrec.checkpoint import CheckpointManager
from nestrec.distributed import Topology
from nestrec.report import write_report
from nestrec.trace import Timeline, load_spans
from nestrec.training.run_checkpointer import RunInterruptedError
from nestrec.training.state import run_digest
from nestrec.training.trainer import Trainer
from support.fail_points import armed
from support.tiny_runs import config_of, make_datasets

EXACT = ["dual_buffer", "frozen_window", "nested"]
RUN = {"training.max_steps": 11, "training.epochs": 9, "training.checkpoint_every_steps": 4, "batch.micro_batches": 3}


@pytest.fixture(scope="module")
def tiny_data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return folder


def run(family: str, data: Path, folder: Path, schedule: str, **more: object) -> dict[str, str]:
    given = {**RUN, "pipeline.schedule": schedule, **{name.replace("__", "."): value for name, value in more.items()}}
    Trainer(config_of(family, data, given), folder, Topology.single()).train()
    return run_digest(folder)


@pytest.mark.parametrize(
    "family", ["hstu", "rows", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sasrec", "ranking"))]
)
def test_a_run_under_any_exact_schedule_is_the_serial_run(tiny_data, tmp_path, family):
    expected = run(family, tiny_data, tmp_path / "serial", "serial")
    for schedule in EXACT:
        assert run(family, tiny_data, tmp_path / schedule, schedule) == expected


@pytest.mark.parametrize(
    "clustering", ["greedy", *(pytest.param(name, marks=pytest.mark.slow) for name in ("refined", "edges"))]
)
def test_clustered_runs_agree_between_schedules_and_differ_only_in_rounding(tiny_data, tmp_path, clustering):
    unmeasured = {"training__evaluate_every_epochs": 0}
    more = {"pipeline__clustering": clustering, "pipeline__window_cache": True, **unmeasured}
    serial, nested = (run("hstu", tiny_data, tmp_path / s, s, **more) for s in ("serial", "nested"))
    assert nested == serial
    plain = run("hstu", tiny_data, tmp_path / "plain", "serial", **unmeasured)
    assert plain["consumed"] == serial["consumed"]
    assert plain["table items"] != serial["table items"]


@pytest.mark.parametrize(
    "schedule",
    [
        "nested",
        "priority",
        "semi_async",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("dual_buffer", "frozen_window", "stale")),
    ],
)
def test_told_to_stop_in_a_full_pipeline_it_resumes_exactly(tiny_data, tmp_path, schedule):
    """Rows that the batches after a stop had read already are late in the run without a stop, and so they stay."""
    more = {"training__max_steps": 14, "training__incremental_saves": 2}
    more |= {"pipeline__stale_steps": 2} if schedule == "stale" else {}
    expected = run("rows", tiny_data, tmp_path / "whole", "serial" if schedule in EXACT else schedule, **more)
    given = {**RUN, "pipeline.schedule": schedule, **{name.replace("__", "."): value for name, value in more.items()}}
    for stops, at in enumerate((6, 1), start=1):
        trainer = Trainer(config_of("rows", tiny_data, given), tmp_path / "cut", Topology.single())
        with (
            armed("train.step", lambda: os.kill(os.getpid(), signal.SIGTERM), at=at),
            pytest.raises(RunInterruptedError),
        ):
            trainer.train()
        assert trainer.state.step == (9, 13)[stops - 1], "between two saves"
    assert run("rows", tiny_data, tmp_path / "cut", schedule, **more) == expected


@pytest.mark.parametrize("schedule", ["stale", "semi_async"])
def test_told_to_stop_at_a_step_that_is_saved_anyway_it_reads_anew_as_without_a_stop(tiny_data, tmp_path, schedule):
    expected = run("rows", tiny_data, tmp_path / "whole", schedule)
    trainer = Trainer(
        config_of("rows", tiny_data, {**RUN, "pipeline.schedule": schedule}), tmp_path / "cut", Topology.single()
    )
    with armed("train.step", lambda: os.kill(os.getpid(), signal.SIGTERM), at=5), pytest.raises(RunInterruptedError):
        trainer.train()
    assert trainer.state.step == 8
    assert run("rows", tiny_data, tmp_path / "cut", schedule) == expected


def test_a_crash_in_a_full_pipeline_resumes_exactly(tiny_data, tmp_path):
    class Crash(Exception):
        pass

    def crash() -> None:
        raise Crash

    expected = run("rows", tiny_data, tmp_path / "whole", "serial")
    given = {**RUN, "pipeline.schedule": "nested"}
    trainer = Trainer(config_of("rows", tiny_data, given), tmp_path / "cut", Topology.single())
    with armed("train.step", crash, at=6), pytest.raises(Crash):
        trainer.train()
    assert run("rows", tiny_data, tmp_path / "cut", "nested") == expected


def test_stale_trains_and_is_another_run(tiny_data, tmp_path):
    serial = run("hstu", tiny_data, tmp_path / "serial", "serial")
    assert run("hstu", tiny_data, tmp_path / "stale", "stale", pipeline__stale_steps=2) != serial


@pytest.mark.parametrize("schedule", ["serial", "stale", "semi_async"])
def test_a_table_with_a_time_to_live_trains_and_is_measured_while_no_row_is_admitted(tiny_data, tmp_path, schedule):
    more = {"task__table_store__eviction": "ttl", "task__table_store__ttl_steps": 3, "training__epochs": 1}
    digest = run("rows", tiny_data, tmp_path, schedule, task__table_store__admission_count=1000, **more)
    assert digest["table categories"] == "empty"
    assert '"kind": "evaluation"' in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    "negatives", ["in_batch", *(pytest.param(name, marks=pytest.mark.slow) for name in ("groups", "popularity"))]
)
def test_losses_that_couple_the_samples_of_a_micro_batch_are_those_of_serial(tiny_data, tmp_path, negatives):
    sharing = 1 if negatives == "groups" else 3
    more = {
        "task__negatives__sampler": negatives,
        "task__negatives__sharing": sharing,
        "task__negatives__variant": "fused",
        "task__negatives__lookup": "float16",
        "training__evaluate_every_epochs": 0,
    }
    expected = run("hstu", tiny_data, tmp_path / "serial", "serial", **more)
    for schedule in [*EXACT, "priority"]:
        assert run("hstu", tiny_data, tmp_path / schedule, schedule, **more) == expected
    for schedule in ("stale", "semi_async"):
        assert run("hstu", tiny_data, tmp_path / schedule, schedule, **more)["consumed"] == expected["consumed"]


def test_a_delay_of_nothing_is_refused():
    from nestrec.pipeline import PipelineConfig

    with pytest.raises(UserError, match="must be 1 or more"):
        PipelineConfig(schedule="stale", stale_steps=0)


def test_auto_chooses_a_window_logs_it_saves_it_and_can_be_replayed(tiny_data, tmp_path):
    auto = {
        "batch__micro_batches": "auto",
        "training__max_steps": 90,
        "training__epochs": 60,
        "training__evaluate_every_epochs": 0,
        "training__checkpoint_every_steps": 45,
    }
    run("hstu", tiny_data, tmp_path / "auto", "nested", **auto)
    lines = [json.loads(line) for line in (tmp_path / "auto" / "metrics.jsonl").read_text().splitlines()]
    logged = [line["text"] for line in lines if line.get("text", "").startswith("micro-batches: ")]
    restored = CheckpointManager(tmp_path / "auto" / "checkpoints").restore_latest()
    assert restored is not None
    changes = restored.state["train"]["window_changes"]
    assert len(changes) == len(logged) == 2
    assert changes[0]["micro_batches"] == 8
    again = {**auto, "pipeline__replay": json.dumps(changes)}
    assert run("hstu", tiny_data, tmp_path / "again", "serial", **again) == run_digest(tmp_path / "auto")


def test_a_run_leaves_a_trace_whose_parts_add_up_and_which_perfetto_opens(tiny_data, tmp_path):
    run(
        "hstu",
        tiny_data,
        tmp_path,
        "nested",
        training__max_steps=41,
        training__epochs=30,
        training__evaluate_every_epochs=0,
        training__checkpoint_every_steps="none",
    )
    spans = load_spans(tmp_path / "trace.jsonl")
    timeline = Timeline(spans)
    steps = timeline.steps(0)
    assert len(steps) == 20
    whole = {span.step: span.duration_ns for span in spans if span.kind == "step"}
    assert all(timeline.parts(step).step_ns == whole[step] for step in steps)
    lanes = {"compute", "communication", "lookup", "transfer"}
    assert lanes <= {span.lane for span in spans}
    exchanges = [span for span in spans if span.name in ("train.embedding.vectors", "train.embedding.gradients")]
    assert all(span.rows > 0 and span.micro_batch is not None and span.step is not None for span in exchanges)
    events = json.loads((tmp_path / "trace.perfetto.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} >= lanes
    assert "Lanes from step" in write_report(tmp_path).read_text()


@pytest.mark.parametrize("schedule", ["serial", "nested"])
def test_a_run_that_fails_leaves_no_thread_behind(tiny_data, tmp_path, schedule):
    """A process that ends while a thread of its own is busy in torch is aborted instead, with another exit code."""

    def fail() -> None:
        raise UserError("is wrong", option="something", value=1)

    given = {**RUN, "pipeline.schedule": schedule}
    trainer = Trainer(config_of("rows", tiny_data, given), tmp_path, Topology.single())
    before = set(threading.enumerate())
    with armed("train.step", fail, at=3), pytest.raises(UserError, match="is wrong"):
        trainer.train()
    assert set(threading.enumerate()) <= before
