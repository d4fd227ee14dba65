"""On a GPU, every exact schedule is bitwise identical to serial, and no lane synchronizes the host with the device."""

import itertools
from collections import Counter

import pytest
import torch
from schedule_jobs import Job, Training, batches_of, compare

from nestrec.distributed import Topology
from nestrec.pipeline import LearningRates, LookaheadIterator, TrainingStep
from nestrec.trace import Timeline

pytestmark = pytest.mark.gpu

EXACT = ["dual_buffer", "frozen_window", "nested"]
STREAMS = ["zipf", "distance_one", "distance_two", "all_equal", "no_overlap"]
GRID = list(itertools.product(["device", "dram", "disk"], ["sgd", "rowwise_adagrad", "adam"], [False, True]))


@pytest.mark.parametrize(
    ("number", "store", "optimizer", "window_cache"), [(i, *values) for i, values in enumerate(GRID)], ids=str
)
def test_exact_schedules_equal_serial_bitwise_on_gpu(tmp_path, number, store, optimizer, window_cache):
    job = Job(
        stream=STREAMS[number % 5],
        optimizer=optimizer,
        store=store,
        window_cache=window_cache,
        folder=str(tmp_path),
        fences=(25,),
        device="cuda",
    )
    assert compare(Topology.single("cuda"), EXACT, job) == dict.fromkeys(EXACT, True)


@pytest.mark.parametrize(
    ("store", "optimizer", "dtype"), [("device", "rowwise_adagrad", "bfloat16"), ("dram", "adam", "float16")]
)
def test_half_precision_rows_equal_serial_for_every_schedule(store, optimizer, dtype):
    job = Job(store=store, optimizer=optimizer, dtype=dtype, device="cuda", num_steps=30)
    assert compare(Topology.single("cuda"), EXACT, job) == dict.fromkeys(EXACT, True)


@pytest.mark.parametrize("stream", STREAMS)
def test_nested_schedule_equals_serial_on_every_stream(stream):
    job = Job(stream=stream, store="dram", device="cuda")
    assert compare(Topology.single("cuda"), ["nested"], job) == {"nested": True}


@pytest.mark.parametrize(
    ("rule", "stream"),
    [
        ("shared-row copy", "distance_one"),
        ("write-back before gather", "distance_two"),
        ("ordered write-back", "distance_one"),
    ],
)
def test_schedule_rule_violations_are_detected(rule, stream):
    job = Job(stream=stream, broken=rule, store="dram", device="cuda")
    assert compare(Topology.single("cuda"), ["nested"], job) == {"nested": False}


def steady_steps(training: Training, feed: LookaheadIterator, first: int, last: int) -> None:
    for number in range(first, last + 1):
        rates = LearningRates(dense=0.01, tables=0.1)
        training.pipeline.schedule.advance(TrainingStep(number=number, batch=next(feed), rates=rates), feed)


@pytest.mark.filterwarnings("ignore::UserWarning")  # the debug mode and the profiler warn that they are prototypes
@pytest.mark.parametrize("window_cache", [False, True])
@pytest.mark.parametrize(("store", "dtype"), [("device", "float32"), ("device", "bfloat16"), ("dram", "float32")])
@pytest.mark.parametrize("schedule", ["frozen_window", "dual_buffer", "nested"])
def test_lanes_never_synchronize_in_steady_state(schedule, store, dtype, window_cache):
    job = Job(store=store, dtype=dtype, window_cache=window_cache, num_steps=40, device="cuda")
    training = Training(Topology.single("cuda"), schedule, job)
    feed = LookaheadIterator(batches_of(job, training.topology, 1))
    steady_steps(training, feed, 1, 10)
    torch.cuda.set_sync_debug_mode("error")
    try:
        steady_steps(training, feed, 11, 20)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        steady_steps(training, feed, 21, 30)
    calls = Counter(event.name() for event in profile.profiler.kineto_results.events())
    assert calls["cudaLaunchKernel"] > 100
    # The profiler itself makes two of these calls, at its start and at its end.
    assert calls["cudaDeviceSynchronize"] + calls["cudaStreamSynchronize"] <= 2, calls
    training.pipeline.close()
    training.engine.close()


def test_timeline_parts_add_up_to_step_on_gpu():
    job = Job(num_steps=8, store="dram", device="cuda", num_samples=600, num_micro_batches=2)
    training = Training(Topology.single("cuda"), "nested", job)
    training.run()
    timeline = Timeline(training.spans)
    assert timeline.steps() == list(range(1, 9))
    for step in timeline.steps():
        parts = timeline.parts(step)
        raw = timeline.raw(step)
        assert parts.compute_ns > 0
        assert parts.compute_ns <= raw.compute_ns
        assert (
            parts.step_ns == parts.compute_ns + parts.exposed_lookup_ns + parts.exposed_communication_ns + parts.idle_ns
        )
