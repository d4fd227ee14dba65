"""A program is what the schedule itself does."""

from collections import Counter

import pytest

from nestrec.pipeline import SCHEDULES, PipelineConfig
from nestrec.planning.simulator.rehearsal import rehearse

STEPS, PARTS = 6, 3


def program_of(schedule):
    return rehearse(PipelineConfig(schedule=schedule), micro_batches=PARTS, steps=STEPS)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_batch_is_computed_once_in_every_micro_batch(schedule):
    done = Counter((s.step, s.micro_batch) for s in program_of(schedule).stages if "forward_backward" in s.operations)
    assert done == {(step, part): 1 for step in range(1, STEPS + 1) for part in range(PARTS)}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_wait_only_for_earlier_ones(schedule):
    program = program_of(schedule)
    assert all(earlier < place for place, stage in enumerate(program.stages) for earlier in stage.after)
    known = set()
    for event in program.events:
        if event.kind == "wait":
            assert event.place in known
        elif event.kind in ("work", "submit"):
            known.add(event.place)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rehearsal_is_the_same_each_time(schedule):
    first = program_of(schedule)
    rehearse.cache_clear()
    assert program_of(schedule) == first


def test_nested_fetches_the_next_batch_during_this_one_and_dual_buffer_does_not_overlap_exchanges():
    lookups = [s for s in program_of("nested").stages if s.operations == ("fetch",)]
    assert all(stage.lane == "lookup" for stage in lookups)
    serial = program_of("serial")
    assert {stage.lane for stage in serial.stages} == {"compute"}
    assert not any(event.kind == "submit" for event in serial.events)


def test_serial_route_holds_its_three_operations():
    route = next(s for s in program_of("serial").stages if s.name == "train.embedding.route")
    assert route.operations == ("deduplicate", "exchange_keys", "arrange")
