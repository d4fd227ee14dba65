"""Small parts of a run: state, meter, stop request, run folder."""

import json
import math
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nestrec.base.errors import CorruptFileError, NonFiniteError, UserError
from nestrec.data.batch_loader import Batch, MicroBatch
from nestrec.data.batch_order import BatchPosition
from nestrec.pipeline import StepTotals
from nestrec.tasks.metrics import ConfidenceInterval
from nestrec.tasks.task import Evaluation, batches_of_rank
from nestrec.training.callbacks import Meter
from nestrec.training.recipes import recipe
from nestrec.training.run_checkpointer import StopRequest
from nestrec.training.run_folder import RunFolder
from nestrec.training.run_identity import check_same_data
from nestrec.training.state import TrainState
from nestrec_bench.harness.clocks import ManualClock


def batch_of(samples: list[int], num_tokens: int = 5) -> Batch:
    part = MicroBatch(np.array(samples), {}, {}, max_length=1, num_tokens=num_tokens)
    return Batch(BatchPosition(), 1.0, np.array(samples), (part, part), tokens=np.full(len(samples), 1))


def totals(loss: float = 1.0, norm: float = 1.0, stop: float = 0.0) -> StepTotals:
    loss_, norm_, stop_ = (torch.tensor(value, dtype=torch.float64) for value in (loss, norm, stop))
    return StepTotals(loss=loss_, gradient_norm=norm_.float(), stop_requested=stop_)


def test_train_state_consumed_depends_on_samples_and_order() -> None:
    def consumed(*batches: list[int]) -> str:
        state = TrainState()
        for samples in batches:
            state = state.after(batch_of(samples), BatchPosition(0, 1))
        return state.consumed

    assert consumed([1, 2], [3]) == consumed([1, 2], [3])
    others = [
        consumed([2, 1], [3]),
        consumed([1], [2, 3]),
        consumed([1, 2, 3]),
        consumed([1, 2]),
        consumed([3], [1, 2]),
    ]
    assert len({consumed([1, 2], [3]), *others}) == 6


def test_train_state_counts_evaluations_since_the_best() -> None:
    state = TrainState(step=3).after_evaluation(0.5)
    assert (state.best_score, state.best_step, state.evaluations_since_best) == (0.5, 3, 0)
    worse = state.after_evaluation(0.5).after_evaluation(0.4)
    assert (worse.best_score, worse.best_step, worse.evaluations_since_best) == (0.5, 3, 2)
    assert worse.after_evaluation(0.6).evaluations_since_best == 0
    assert worse.after_evaluation(math.nan).best_step == 3


def test_train_state_without_score_prefers_the_last_weights() -> None:
    state = replace(TrainState(step=3).after_evaluation(math.nan), step=6).after_evaluation(math.nan)
    assert (state.best_step, state.evaluations_since_best) == (6, 0)
    assert state.after_evaluation(0.5).best_score == 0.5


def test_train_state_round_trips_through_json() -> None:
    state = TrainState(step=7, position=BatchPosition(2, 3), consumed="ab", best_score=0.25, best_step=4)
    assert TrainState.from_plain(json.loads(json.dumps(state.to_plain()))) == state


def test_meter_reads_one_step_late_and_counts_between_reports() -> None:
    clock = ManualClock()
    meter = Meter(clock)
    meter.start()
    meter.watch(1, batch_of([1, 2, 3]), totals(loss=3.0))
    assert np.isnan(meter.loss)
    clock.sleep(1.0)
    meter.watch(2, batch_of([4]), totals(loss=2.0, stop=1.0))
    assert (meter.loss, meter.stop_requested) == (3.0, False)
    clock.sleep(1.0)
    speeds = meter.speeds()
    assert (speeds["samples_per_s"], speeds["tokens_per_s"], speeds["step_ms"]) == (2.0, 10.0, 1000.0)
    assert speeds["memory_mib"] > 1
    meter.flush()
    assert (meter.loss, meter.stop_requested) == (2.0, True)
    clock.sleep(1.0)
    assert meter.speeds()["samples_per_s"] == 0.0


@pytest.mark.parametrize(("loss", "norm"), [(float("nan"), 1.0), (-float("inf"), 1.0), (1.0, float("nan"))])
def test_meter_non_finite_loss_stops_the_run_with_its_step(loss: float, norm: float) -> None:
    meter = Meter()
    meter.watch(8, batch_of([1]), totals(loss=loss, norm=norm))
    with pytest.raises(NonFiniteError, match="step=8: the loss"):
        meter.flush()


def test_meter_non_finite_rows_stop_the_run_with_their_table() -> None:
    meter = Meter(tables=("users", "items"))
    meter.watch(8, batch_of([1]), replace(totals(), rows=torch.tensor([0.0, float("nan")], dtype=torch.float64)))
    with pytest.raises(NonFiniteError, match=r"step=8: rows of the table 'items' .*; the run stops"):
        meter.flush()


def test_stop_request_is_set_by_signal_and_restores_handlers() -> None:
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    with StopRequest().handling_signals() as stop:
        assert not stop.is_set
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_set
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == before


def test_stop_request_in_another_thread_keeps_handlers() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def listen() -> None:
        with StopRequest().handling_signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert seen == [before]


def test_run_folder_drops_metrics_after_the_resumed_step(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3):
        folder.record("step", step=step, loss=1.0 / step)
    with folder.metrics.open("a") as lines:
        lines.write('{"kind": "step", "st')
    folder.drop_metrics_after(2)
    assert [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()] == [1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    RunFolder(tmp_path / "empty").drop_metrics_after(5)


def test_run_folder_is_written_only_by_the_first_rank(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", is_writer=False)
    folder.write_start_files(recipe("demo"), "{}", torch.device("cpu"))
    folder.record("step", step=1)
    folder.write_evaluation(Evaluation("test", "a", {"model": {"a": ConfidenceInterval(1, 1, 1)}}), 1, 1)
    assert not (tmp_path / "run").exists()


def test_run_folder_round_trips_its_config(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.write_start_files(recipe("criteo_dlrm"), "{}", torch.device("cpu"))
    assert RunFolder(tmp_path / "run").config() == recipe("criteo_dlrm")
    assert json.loads((tmp_path / "run" / "versions.json").read_text())["torch"] == torch.__version__
    with pytest.raises(UserError, match="does not contain a run"):
        RunFolder(tmp_path).config()


@pytest.mark.parametrize("content", [b"", b'{"run": "a', b"\xff\xfe"])
@pytest.mark.parametrize("name", ["config.json", "identity.json", "beginning.json", "card.json"])
def test_run_folder_corrupt_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    read = {
        "config.json": RunFolder(tmp_path).config,
        "identity.json": RunFolder(tmp_path).identity,
        "beginning.json": RunFolder(tmp_path).warm_start_source,
        "card.json": lambda: check_same_data(tmp_path, tmp_path, None),  # type: ignore[arg-type]
    }[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorruptFileError, match=f"{name}.*cannot read the file"):
        read()


def test_run_folder_stores_evaluation_with_values_per_user(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    values = {"model": {"ndcg@10": ConfidenceInterval(0.5, 0.4, 0.6)}}
    folder.write_evaluation(Evaluation("valid", "ndcg@10", values, {"users": np.arange(3)}), 5, 1)
    (line,) = folder.metrics.read_text().splitlines()
    assert json.loads(line)["metrics"]["model"]["ndcg@10"] == [0.5, 0.4, 0.6]
    assert json.loads((tmp_path / "eval" / "valid.json").read_text())["step"] == 5
    with np.load(tmp_path / "eval" / "valid.npz") as arrays:
        assert arrays["users"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("num_users", [0, 1, 7, 12])
def test_batches_of_rank_cover_users_once_in_equal_rounds(world: int, num_users: int) -> None:
    shares = [batches_of_rank(np.arange(num_users), 3, rank, world) for rank in range(world)]
    assert len({len(parts) for parts in shares}) == 1
    assert sorted(user for parts in shares for part in parts for user in part) == list(range(num_users))
    assert all(len(part) <= 3 for parts in shares for part in parts)
