"""The cost model of a frozen window, and the number of micro-batches that is chosen from it."""

import json
from dataclasses import replace

import pytest

from nestrec.base.config import to_plain
from nestrec.base.config_values import from_plain
from nestrec.base.errors import UserError
from nestrec.data.batch_loader import BatchConfig
from nestrec.data.batch_order import BatchPosition
from nestrec.distributed import Topology
from nestrec.pipeline import SCHEDULES, PipelineConfig
from nestrec.pipeline.micro_batch_tuner import FEW, MANY, MicroBatchTuner
from nestrec.pipeline.window_cost_model import (
    MeasuredWindow,
    MicroBatchChange,
    MicroBatchHistory,
    choose_num_micro_batches,
    fit_window,
    independent_ms,
    overlapped_ms,
    sequential_ms,
    vectors_first_ms,
)
from nestrec.trace import Span


@pytest.mark.parametrize("num_micro_batches", [1, 2, 4, 8, 16])
def test_window_size_exposes_first_and_last_exchange(num_micro_batches):
    compute = 1712.0 / num_micro_batches
    exchange = 1185.0 / (2 * num_micro_batches)
    window = overlapped_ms(
        [compute] * num_micro_batches, [exchange] * num_micro_batches, [exchange] * num_micro_batches
    )
    assert window == pytest.approx(1712.0 + 1185.0 / num_micro_batches)


def test_window_size_is_bounded_by_communication():
    window = overlapped_ms([1.0] * 8, [2.0] * 8, [2.0] * 8)
    assert 32.0 <= window <= 32.0 + 2.0


def test_window_size_fit_recovers_measurements():
    model = fit_window(MeasuredWindow(2, 110.0, 52.0), MeasuredWindow(8, 140.0, 58.0))
    assert (model.compute_ms, model.compute_part_ms) == pytest.approx((100.0, 5.0))
    assert (model.communication_ms, model.communication_part_ms) == pytest.approx((50.0, 1.0))
    assert fit_window(MeasuredWindow(2, 110.0, 52.0), MeasuredWindow(8, 100.0, 40.0)).compute_part_ms == 0.0


def test_window_size_grows_only_if_faster():
    candidates = (1, 2, 4, 8, 16, 32)
    free = fit_window(MeasuredWindow(2, 100.0, 60.0), MeasuredWindow(8, 100.0, 60.0))
    costly = fit_window(MeasuredWindow(2, 100.0, 60.0), MeasuredWindow(8, 160.0, 60.0))
    nothing_to_hide = fit_window(MeasuredWindow(2, 100.0, 0.0), MeasuredWindow(8, 101.0, 0.0))
    chosen = [choose_num_micro_batches(model, candidates, overlapped_ms) for model in (free, costly, nothing_to_hide)]
    assert chosen == [16, 2, 1]


def test_window_size_depends_on_exchange_order():
    compute, vectors, gradients = [10.0, 20.0], [1.0, 2.0], [3.0, 4.0]
    assert sequential_ms(compute, vectors, gradients) == 40.0
    assert vectors_first_ms(compute, vectors, gradients) == 1.0 + 30.0 + 4.0
    assert vectors_first_ms([1.0, 1.0], [5.0, 5.0], [3.0, 3.0]) == 10.0 + 3.0 + 3.0, "gradients come after all vectors"
    assert independent_ms(compute, vectors, gradients) == 30.0
    assert independent_ms([1.0], [2.0], [3.0]) == 5.0


def measured_spans(first_step: int, num_micro_batches: int) -> list[Span]:
    """Return the spans of steps with 100 ms of computation and 80 ms of exchanges, for any number of micro-batches."""
    spans: list[Span] = []
    parts = [
        ("train.embedding.exchange_vectors", "communication", 40),
        ("train.forward_backward", "compute", 100),
        ("train.embedding.exchange_gradients", "communication", 40),
    ]
    for step in range(first_step, first_step + 12):
        start = now = step * 1_000_000_000
        for part in range(num_micro_batches):
            for name, kind, total_ms in parts:
                end = now + total_ms * 1_000_000 // num_micro_batches
                lane = "compute" if kind == "compute" else "communication"
                spans.append(
                    Span(
                        id=len(spans),
                        name=name,
                        kind=kind,
                        lane=lane,
                        start_ns=now,
                        end_ns=end,
                        step=step,
                        micro_batch=part,
                    )
                )
                now = end
        spans.append(
            Span(id=len(spans), name="train.step", kind="step", lane="compute", start_ns=start, end_ns=now, step=step)
        )
    return spans


@pytest.mark.parametrize(
    ("schedule", "chosen"),
    [("serial", 1), ("dual_buffer", 1), ("stale", 1), ("semi_async", 1), ("priority", 32), ("frozen_window", 32),
     ("nested", 32)],
)  # fmt: skip
def test_window_size_uses_order_of_running_schedule(schedule, chosen):
    """Splitting a batch gains nothing if exchanges are sequential or belong to other steps."""
    tuner = MicroBatchTuner(BatchConfig(num_micro_batches="auto"), PipelineConfig(schedule=schedule), Topology.single())
    first = tuner.decide(measured_spans(1, FEW), 12, BatchPosition(0, 12), lambda position: BatchPosition(0, 40))
    assert first is not None
    assert first.micro_batches == MANY
    second = tuner.decide(measured_spans(13, MANY), 24, BatchPosition(0, 24), lambda position: BatchPosition(1, 0))
    assert second is not None
    assert second.micro_batches == chosen


def test_window_size_measurements_survive_restart():
    def make_tuner() -> MicroBatchTuner:
        return MicroBatchTuner(
            BatchConfig(num_micro_batches="auto"), PipelineConfig(schedule="nested"), Topology.single()
        )

    first = make_tuner().decide(measured_spans(1, FEW), 12, BatchPosition(0, 12), lambda position: BatchPosition(0, 40))
    assert first is not None
    resumed = make_tuner()
    resumed.resume([from_plain(MicroBatchChange, json.loads(json.dumps(to_plain(first))))], 40)
    second = resumed.decide(measured_spans(41, MANY), 52, BatchPosition(0, 52), lambda position: BatchPosition(1, 0))
    assert second is not None
    assert second.micro_batches == 32


def test_window_size_requires_schedule_support(monkeypatch):
    spec = replace(SCHEDULES.find("serial"), window_ms=None)
    monkeypatch.setattr(type(SCHEDULES), "find", lambda seam, name, field: spec)
    with pytest.raises(UserError, match="the best number of micro-batches is unknown"):
        MicroBatchTuner(BatchConfig(num_micro_batches="auto"), PipelineConfig(), Topology.single())
    MicroBatchTuner(BatchConfig(num_micro_batches=4), PipelineConfig(), Topology.single())


def test_window_size_changes_apply_from_their_first_batch():
    schedule = MicroBatchHistory(2)
    schedule.add(MicroBatchChange(step=20, first=BatchPosition(0, 33), micro_batches=8))
    schedule.add(MicroBatchChange(step=60, first=BatchPosition(1, 5), micro_batches=4))
    positions = [
        BatchPosition(0, 32),
        BatchPosition(0, 33),
        BatchPosition(1, 4),
        BatchPosition(1, 5),
        BatchPosition(2, 0),
    ]
    assert [schedule.at(position) for position in positions] == [2, 8, 8, 4, 4]
