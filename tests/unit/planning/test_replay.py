"""Replays: serial adds up, windows follow the window model, many ranks wait for the last, two replays agree."""

import numpy as np
import pytest
from planning_costs import TableOfCosts, typical

from nestrec.pipeline import SCHEDULES, PipelineConfig
from nestrec.pipeline.window_cost_model import overlapped_ms
from nestrec.planning.simulator.program_replay import Mesh, replay
from nestrec.planning.simulator.rehearsal import rehearse
from nestrec.planning.simulator.shared_cores import Hosts, replay_shared

STEPS, PARTS = 8, 4
NOT_SERIAL = ("read_ahead", "train.embedding.intersect", "train.embedding.copy", "sum_over_holders")


def program_of(schedule, parts=PARTS):
    return rehearse(PipelineConfig(schedule=schedule), micro_batches=parts, steps=STEPS)


def test_a_serial_step_is_the_sum_of_its_operations():
    cost = typical(PARTS)
    once = sum(v for k, v in cost.items() if k not in NOT_SERIAL)
    many = (PARTS - 1) * sum(
        cost[k] for k in ("exchange_vectors", "forward_backward", "exchange_gradients", "add_gradients")
    )
    done = replay(program_of("serial"), TableOfCosts(cost), Mesh(1, 1))
    assert done.step_s()[0] == pytest.approx(once + many)


def test_a_frozen_window_takes_what_the_window_model_says():
    vectors, compute, gradients = 0.2, 0.3, 0.15
    cost = {"exchange_vectors": vectors, "forward_backward": compute, "exchange_gradients": gradients}
    done = replay(program_of("frozen_window"), TableOfCosts(cost), Mesh(1, 2))
    assert done.step_s()[0] == pytest.approx(overlapped_ms([compute] * PARTS, [vectors] * PARTS, [gradients] * PARTS))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_parts_of_a_step_add_up_to_it(schedule):
    mesh = Mesh(2, 3)
    done = replay(program_of(schedule), TableOfCosts(typical(PARTS), mesh.world, spread=0.2), mesh)
    for rank in range(mesh.world):
        parts = done.parts(rank)
        assert parts.step_ns == pytest.approx(done.step_s()[rank] * 1e9, abs=100)
        assert min(parts.compute_ns, parts.exposed_lookup_ns, parts.exposed_communication_ns, parts.idle_ns) >= 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_with_cores_enough_take_the_same_time_in_both_replays(schedule):
    mesh = Mesh(2, 2)
    costs = TableOfCosts(typical(PARTS), mesh.world, spread=0.3)
    many = replay(program_of(schedule), costs, mesh)
    few = replay_shared(program_of(schedule), costs, mesh, Hosts(ranks=4, cores=16))
    np.testing.assert_allclose(few.start, many.start, atol=1e-9)
    np.testing.assert_allclose(few.end, many.end, atol=1e-9)
    np.testing.assert_allclose(few.entered, many.entered, atol=1e-9)


def test_ranks_that_share_a_core_take_turns():
    cost = TableOfCosts({"forward_backward": 1.0}, 2)
    alone = replay_shared(program_of("serial", 1), cost, Mesh(1, 2), Hosts(ranks=2, cores=2))
    shared = replay_shared(program_of("serial", 1), cost, Mesh(1, 2), Hosts(ranks=2, cores=1))
    crowded = replay_shared(program_of("serial", 1), cost, Mesh(1, 2), Hosts(ranks=2, cores=1, crowding=0.5))
    steps = [done.step_s()[0] for done in (alone, shared, crowded)]
    assert steps == pytest.approx([1.0, 2.0, 3.0])


def test_a_collective_waits_for_the_last_rank_of_its_group_and_that_is_idle_time():
    class Uneven(TableOfCosts):
        def of(self, operation, step, micro_batch):
            cost = super().of(operation, step, micro_batch)
            if operation != "forward_backward":
                return cost
            return type(cost)(np.array([1.0, 2.0, 1.0, 1.0]))

    done = replay(program_of("serial", 1), Uneven({"exchange_gradients": 0.5}, 4), Mesh(2, 2))
    gradients = next(i for i, s in enumerate(done.program.stages) if "exchange_gradients" in s.operations)
    assert done.end[gradients].tolist() == pytest.approx([2.5, 2.5, 1.5, 1.5])
    assert done.parts(0).idle_ns == pytest.approx(1e9, abs=10)
    assert done.parts(1).idle_ns == pytest.approx(0, abs=10)


def test_schedules_hide_what_their_names_promise():
    def parts_of(schedule):
        return replay(program_of(schedule), TableOfCosts(typical(PARTS)), Mesh(1, 1)).parts(0)

    serial, nested = parts_of("serial"), parts_of("nested")
    assert parts_of("dual_buffer").exposed_lookup_ns < 0.1 * serial.exposed_lookup_ns
    assert parts_of("frozen_window").exposed_communication_ns < 0.5 * serial.exposed_communication_ns
    assert nested.exposed_lookup_ns < 0.1 * serial.exposed_lookup_ns
    assert nested.step_ns < parts_of("dual_buffer").step_ns < serial.step_ns
