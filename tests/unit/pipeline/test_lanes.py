"""Lanes run tasks in order, propagate errors, and record spans with the awaited span."""

import gc
import threading
import weakref

import pytest
import torch

from nestrec.pipeline.lanes import Label, Lane, Lanes, RunAheadLimiter
from nestrec.trace import Tracer

CPU = torch.device("cpu")


def label(name: str, step: int = 1) -> Label:
    return Label(name=name, kind="lookup", step=step)


@pytest.fixture
def tracer():
    return Tracer()


def test_lane_runs_tasks_in_order_and_returns_futures(tracer):
    lane = Lane("a", tracer, RunAheadLimiter(CPU))
    events = []
    tickets = [lane.submit(lambda span, i=i: events.append(i) or i * i, label("t")) for i in range(20)]
    assert [ticket.result() for ticket in tickets] == [i * i for i in range(20)]
    assert events == list(range(20))
    lane.close()


def test_lane_task_waits_for_futures_of_other_lanes(tracer):
    first = Lane("a", tracer, RunAheadLimiter(CPU))
    second = Lane("b", tracer, RunAheadLimiter(CPU))
    go = threading.Event()
    slow = first.submit(lambda span: go.wait(60), label("slow"))
    after = second.submit(lambda span: "done", label("after"), after=[slow])
    assert not after._done.is_set()
    go.set()
    assert after.result() == "done"
    first.close()
    second.close()
    spans = {span.name: span for span in tracer.spans() if span.kind != "wait"}
    assert spans["after"].start_ns >= spans["slow"].end_ns


def test_lane_error_stops_lane_and_waiters(tracer):
    first = Lane("a", tracer, RunAheadLimiter(CPU))
    second = Lane("b", tracer, RunAheadLimiter(CPU))
    ran = []

    def fail(span):
        raise ValueError("broken")

    failing = first.submit(fail, label("fails"))
    later = first.submit(lambda span: ran.append(1), label("later"))
    dependent = second.submit(lambda span: ran.append(2), label("dependent"), after=[failing])
    for ticket in (failing, later, dependent):
        with pytest.raises(ValueError, match="broken"):
            ticket.result()
    assert not ran
    first.close()
    second.close()


def test_lane_wait_span_names_awaited_span(tracer):
    lane = Lane("a", tracer, RunAheadLimiter(CPU))
    go = threading.Event()
    ticket = lane.submit(lambda span: go.wait(60), label("slow", step=7))
    wait_for_end = ticket._done.wait
    ticket._done.wait = lambda: (go.set(), wait_for_end())  # the task continues when a caller waits for it
    with tracer.context(lane="compute", step=8):
        ticket.result()
    lane.close()
    slow, wait = (next(s for s in tracer.spans() if s.name == name) for name in ("slow", "wait"))
    assert (slow.lane, slow.step, wait.lane, wait.step) == ("a", 7, "compute", 8)
    assert wait.awaits == slow.id


def test_lanes_drain_waits_for_all_lanes(tracer):
    lanes = Lanes(tracer, RunAheadLimiter(CPU))
    events = []
    for lane in (lanes.transfer, lanes.communication, lanes.lookup):
        for _ in range(5):
            lane.submit(lambda span, name=lane.name: events.append(name), label("t"))
    lanes.drain()
    assert len(events) == 15
    lanes.close()


def test_lane_retains_results_while_steps_may_use_them(tracer):
    """On a GPU, the memory of a freed result could be reused while a kernel still reads it."""
    run_ahead = RunAheadLimiter(torch.device("cuda"))
    lane = Lane("a", tracer, RunAheadLimiter(CPU))
    lane._run_ahead = run_ahead
    results = [torch.ones(3)]
    reference = weakref.ref(results[0])
    lane.submit(lambda span: results.pop(), label("t")).result()
    gc.collect()
    assert reference() is not None
    lane.close()
    run_ahead._current_step.clear()
    del lane
    gc.collect()
    assert reference() is None
