import json
import threading
from pathlib import Path

import pytest

from nestrec.base.errors import DataError
from nestrec.trace import NullTracer, Tracer, load_spans, merge, save_spans, to_perfetto, write_perfetto
from nestrec_bench.harness.clocks import ManualClock


def test_span_records_attributes_and_times() -> None:
    clock = ManualClock(5.0)
    tracer = Tracer(rank=3, clock=clock)
    with tracer.span("train.embedding.exchange", kind="communication", lane="exchange", step=7, micro_batch=1) as span:
        clock.sleep(0.25)
        span.bytes = 4096
        span.rows = 8
    (recorded,) = tracer.spans()
    assert (recorded.start_s, recorded.end_s, recorded.duration_ns) == (5.0, 5.25, 250_000_000)
    assert (recorded.rank, recorded.lane, recorded.step, recorded.micro_batch) == (3, "exchange", 7, 1)
    assert (recorded.bytes, recorded.rows, recorded.kind) == (4096, 8, "communication")


def test_span_takes_lane_and_step_from_thread_context() -> None:
    tracer = Tracer(clock=ManualClock())
    with tracer.context(lane="store", step=3):
        with tracer.context(micro_batch=2), tracer.span("a"):
            pass
        worker = threading.Thread(target=lambda: tracer.span("b").__enter__().__exit__(None, None, None))
        worker.start()
        worker.join()
    first, second = tracer.spans()
    assert (first.lane, first.step, first.micro_batch) == ("store", 3, 2)
    assert (second.lane, second.step, second.micro_batch) == ("main", None, None)


def test_span_wait_may_name_a_later_span() -> None:
    tracer = Tracer(clock=ManualClock())
    ticket = tracer.new_id()
    with tracer.wait(ticket), tracer.span("work", kind="lookup", lane="store", id=ticket):
        pass
    work, wait = tracer.spans()
    assert wait.awaits == work.id == ticket
    assert wait.id != work.id


def test_span_is_recorded_if_its_block_raises() -> None:
    tracer = Tracer(clock=ManualClock())
    with pytest.raises(ValueError, match="x"), tracer.span("a"):
        raise ValueError("x")
    assert len(tracer.spans()) == 1


def test_tracer_buffer_keeps_the_newest_spans() -> None:
    tracer = Tracer(clock=ManualClock(), capacity=3)
    for index in range(5):
        with tracer.span(str(index)):
            pass
    assert [span.name for span in tracer.take()] == ["2", "3", "4"]
    assert tracer.spans() == []


def test_tracer_is_thread_safe_for_spans_and_counters() -> None:
    tracer = Tracer()

    def work() -> None:
        for _ in range(500):
            with tracer.span("a"):
                tracer.count("rows", 2)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        tracer.spans()
    assert len({span.id for span in tracer.spans()}) == 2000
    assert tracer.counters() == {"rows": 4000}


def test_null_tracer_records_nothing() -> None:
    tracer = NullTracer()
    with tracer.context(lane="x"), tracer.span("a") as span:
        span.bytes = 3
    tracer.count("rows")
    assert tracer.spans() == []
    assert tracer.counters() == {}


def trace_of(rank: int) -> Tracer:
    clock = ManualClock(10.0 + rank)
    tracer = Tracer(rank=rank, clock=clock)
    for lane in ("compute", "store"):
        with tracer.span("train.step", kind="step", lane=lane, step=0, bytes=5):
            clock.sleep(0.5)
    return tracer


def test_spans_round_trip_through_file_with_truncated_line(tmp_path: Path) -> None:
    spans = trace_of(0).spans()
    path = tmp_path / "trace.jsonl"
    save_spans(path, spans[:1])
    save_spans(path, spans[1:], append=True)
    assert load_spans(path) == spans
    with path.open("a") as file:
        file.write('{"id": 3, "na')
    assert load_spans(path) == spans


def test_spans_file_error_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"color": 1}\n')
    with pytest.raises(DataError, match="line 1"):
        load_spans(path)


def test_spans_of_ranks_are_merged_on_one_clock() -> None:
    spans = merge({0: trace_of(0).spans(), 1: trace_of(1).spans()}, {1: 1_000_000_000})
    assert [(span.rank, span.start_s) for span in spans] == [(0, 10.0), (1, 10.0), (0, 10.5), (1, 10.5)]


def test_perfetto_export_has_one_track_per_rank_and_lane(tmp_path: Path) -> None:
    spans = merge({rank: trace_of(rank).spans() for rank in (0, 1)})
    write_perfetto(tmp_path / "trace.json", spans)
    written = json.loads((tmp_path / "trace.json").read_text())
    assert written == to_perfetto(spans)
    events = [event for event in written["traceEvents"] if event["ph"] == "X"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in written["traceEvents"] if e["name"] == "thread_name"}
    assert sorted((pid, name) for (pid, _), name in names.items()) == [
        (0, "compute"),
        (0, "store"),
        (1, "compute"),
        (1, "store"),
    ]
    assert all((event["pid"], event["tid"]) in names for event in events)
    assert [(event["ts"], event["dur"]) for event in events if event["pid"] == 0] == [(0.0, 5e5), (5e5, 5e5)]
    assert events[0]["args"] == {"id": 0, "step": 0, "bytes": 5, "rows": 0}
