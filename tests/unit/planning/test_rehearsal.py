"""A rehearsed program contains the operations of the schedule itself."""

from collections import Counter

import pytest

from nestrec.pipeline import SCHEDULES, PipelineConfig
from nestrec.planning.simulator.rehearsal import rehearse

STEPS, PARTS = 6, 3


def record_program(schedule):
    return rehearse(PipelineConfig(schedule=schedule), micro_batches=PARTS, steps=STEPS)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rehearsal_computes_every_micro_batch_once(schedule):
    done = Counter(
        (s.step, s.micro_batch) for s in record_program(schedule).stages if "forward_backward" in s.operations
    )
    assert done == {(step, part): 1 for step in range(1, STEPS + 1) for part in range(PARTS)}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rehearsal_stages_wait_only_for_earlier_stages(schedule):
    program = record_program(schedule)
    assert all(earlier < index for index, stage in enumerate(program.stages) for earlier in stage.after)
    known = set()
    for event in program.events:
        if event.kind == "wait":
            assert event.index in known
        elif event.kind in ("work", "submit"):
            known.add(event.index)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rehearsal_is_deterministic(schedule):
    first = record_program(schedule)
    rehearse.cache_clear()
    assert record_program(schedule) == first


def test_rehearsal_nested_prefetches_during_exchanges():
    lookups = [s for s in record_program("nested").stages if s.operations == ("fetch_rows",)]
    assert all(stage.lane == "lookup" for stage in lookups)
    serial = record_program("serial")
    assert {stage.lane for stage in serial.stages} == {"compute"}
    assert not any(event.kind == "submit" for event in serial.events)


def test_rehearsal_serial_key_exchange_has_three_operations():
    route = next(s for s in record_program("serial").stages if s.name == "train.embedding.exchange_keys")
    assert route.operations == ("deduplicate", "exchange_keys", "build_exchange_plan")
