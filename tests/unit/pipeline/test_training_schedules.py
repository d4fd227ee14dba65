"""Runs of the training loop are bitwise identical under exact schedules, with evaluations, saves, stops and resumes."""

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
RUN = {
    "training.max_steps": 11,
    "training.epochs": 9,
    "training.checkpoint_every_steps": 4,
    "batch.num_micro_batches": 3,
}


@pytest.fixture(scope="module")
def tiny_data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return folder


def run(family: str, data: Path, folder: Path, schedule: str, **more: object) -> dict[str, str]:
    options = {**RUN, "pipeline.schedule": schedule, **{name.replace("__", "."): value for name, value in more.items()}}
    Trainer(config_of(family, data, options), folder, Topology.single()).train()
    return run_digest(folder)


@pytest.mark.parametrize(
    "family", ["hstu", "rows", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sasrec", "ranking"))]
)
def test_schedule_runs_are_bitwise_identical_to_serial(tiny_data, tmp_path, family):
    expected = run(family, tiny_data, tmp_path / "serial", "serial")
    for schedule in EXACT:
        assert run(family, tiny_data, tmp_path / schedule, schedule) == expected


@pytest.mark.parametrize(
    "clustering", ["greedy", *(pytest.param(name, marks=pytest.mark.slow) for name in ("refined", "edges"))]
)
def test_schedule_runs_with_clustering_agree(tiny_data, tmp_path, clustering):
    without_evaluation = {"training__eval_every_epochs": 0}
    more = {"pipeline__clustering": clustering, "pipeline__window_cache": True, **without_evaluation}
    serial, nested = (run("hstu", tiny_data, tmp_path / s, s, **more) for s in ("serial", "nested"))
    assert nested == serial
    plain = run("hstu", tiny_data, tmp_path / "plain", "serial", **without_evaluation)
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
def test_schedule_stop_in_full_pipeline_resumes_exactly(tiny_data, tmp_path, schedule):
    """Rows that batches after the stop had already read stay stale, as in the run without a stop."""
    more = {"training__max_steps": 14, "training__incremental_checkpoints": 2}
    more |= {"pipeline__stale_steps": 2} if schedule == "stale" else {}
    expected = run("rows", tiny_data, tmp_path / "reference", "serial" if schedule in EXACT else schedule, **more)
    options = {**RUN, "pipeline.schedule": schedule, **{name.replace("__", "."): value for name, value in more.items()}}
    for stops, nth_call in enumerate((6, 1), start=1):
        trainer = Trainer(config_of("rows", tiny_data, options), tmp_path / "stopped", Topology.single())
        with (
            armed("train.step", lambda: os.kill(os.getpid(), signal.SIGTERM), at=nth_call),
            pytest.raises(RunInterruptedError),
        ):
            trainer.train()
        assert trainer.state.step == (9, 13)[stops - 1], "the stop must be between two checkpoints"
    assert run("rows", tiny_data, tmp_path / "stopped", schedule, **more) == expected


@pytest.mark.parametrize("schedule", ["stale", "semi_async"])
def test_schedule_stop_at_checkpoint_step_resumes_exactly(tiny_data, tmp_path, schedule):
    expected = run("rows", tiny_data, tmp_path / "reference", schedule)
    trainer = Trainer(
        config_of("rows", tiny_data, {**RUN, "pipeline.schedule": schedule}), tmp_path / "stopped", Topology.single()
    )
    with (
        armed("train.step", lambda: os.kill(os.getpid(), signal.SIGTERM), at=5),
        pytest.raises(RunInterruptedError),
    ):
        trainer.train()
    assert trainer.state.step == 8
    assert run("rows", tiny_data, tmp_path / "stopped", schedule) == expected


def test_schedule_crash_in_full_pipeline_resumes_exactly(tiny_data, tmp_path):
    class Crash(Exception):
        pass

    def crash() -> None:
        raise Crash

    expected = run("rows", tiny_data, tmp_path / "reference", "serial")
    options = {**RUN, "pipeline.schedule": "nested"}
    trainer = Trainer(config_of("rows", tiny_data, options), tmp_path / "stopped", Topology.single())
    with armed("train.step", crash, at=6), pytest.raises(Crash):
        trainer.train()
    assert run("rows", tiny_data, tmp_path / "stopped", "nested") == expected


def test_schedule_stale_differs_from_serial(tiny_data, tmp_path):
    serial = run("hstu", tiny_data, tmp_path / "serial", "serial")
    assert run("hstu", tiny_data, tmp_path / "stale", "stale", pipeline__stale_steps=2) != serial


@pytest.mark.parametrize("schedule", ["serial", "stale", "semi_async"])
def test_schedule_with_ttl_table_before_admission(tiny_data, tmp_path, schedule):
    more = {"task__table_store__eviction_policy": "ttl", "task__table_store__ttl_steps": 3, "training__epochs": 1}
    digest = run("rows", tiny_data, tmp_path, schedule, task__table_store__admission_threshold=1000, **more)
    assert digest["table categories"] == "empty"
    assert '"kind": "evaluation"' in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    "negatives", ["in_batch", *(pytest.param(name, marks=pytest.mark.slow) for name in ("groups", "popularity"))]
)
def test_schedule_coupled_losses_equal_serial(tiny_data, tmp_path, negatives):
    sharing = 1 if negatives == "groups" else 3
    more = {
        "task__negatives__sampler": negatives,
        "task__negatives__logit_sharing": sharing,
        "task__negatives__loss_variant": "fused",
        "task__negatives__lookup_dtype": "float16",
        "training__eval_every_epochs": 0,
    }
    expected = run("hstu", tiny_data, tmp_path / "serial", "serial", **more)
    for schedule in [*EXACT, "priority"]:
        assert run("hstu", tiny_data, tmp_path / schedule, schedule, **more) == expected
    for schedule in ("stale", "semi_async"):
        assert run("hstu", tiny_data, tmp_path / schedule, schedule, **more)["consumed"] == expected["consumed"]


def test_schedule_rejects_zero_delay():
    from nestrec.pipeline import PipelineConfig

    with pytest.raises(UserError, match="must be 1 or more"):
        PipelineConfig(schedule="stale", stale_steps=0)


def test_schedule_auto_micro_batches_are_logged_and_replayed(tiny_data, tmp_path):
    auto = {
        "batch__num_micro_batches": "auto",
        "training__max_steps": 90,
        "training__epochs": 60,
        "training__eval_every_epochs": 0,
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
    again = {**auto, "pipeline__replay_changes": json.dumps(changes)}
    assert run("hstu", tiny_data, tmp_path / "again", "serial", **again) == run_digest(tmp_path / "auto")


def test_schedule_trace_adds_up_and_exports_to_perfetto(tiny_data, tmp_path):
    run(
        "hstu",
        tiny_data,
        tmp_path,
        "nested",
        training__max_steps=41,
        training__epochs=30,
        training__eval_every_epochs=0,
        training__checkpoint_every_steps="none",
    )
    spans = load_spans(tmp_path / "trace.jsonl")
    timeline = Timeline(spans)
    steps = timeline.steps(0)
    assert len(steps) == 20
    step_ns = {span.step: span.duration_ns for span in spans if span.kind == "step"}
    assert all(timeline.parts(step).step_ns == step_ns[step] for step in steps)
    lanes = {"compute", "communication", "lookup", "transfer"}
    assert lanes <= {span.lane for span in spans}
    exchanges = [
        span
        for span in spans
        if span.name in ("train.embedding.exchange_vectors", "train.embedding.exchange_gradients")
    ]
    assert all(span.rows > 0 and span.micro_batch is not None and span.step is not None for span in exchanges)
    events = json.loads((tmp_path / "trace.perfetto.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} >= lanes
    assert "Lanes from step" in write_report(tmp_path).read_text()


@pytest.mark.parametrize("schedule", ["serial", "nested"])
def test_schedule_failed_run_ends_its_threads(tiny_data, tmp_path, schedule):
    """A process that exits while one of its threads runs PyTorch code is aborted with a different exit code."""

    def fail() -> None:
        raise UserError("is wrong", option="something", value=1)

    options = {**RUN, "pipeline.schedule": schedule}
    trainer = Trainer(config_of("rows", tiny_data, options), tmp_path, Topology.single())
    before = set(threading.enumerate())
    with armed("train.step", fail, at=3), pytest.raises(UserError, match="is wrong"):
        trainer.train()
    assert set(threading.enumerate()) <= before
