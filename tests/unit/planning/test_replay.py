"""Replays: serial steps are sums, windows follow the window model, ranks wait for the slowest, two replays agree."""

import numpy as np
import pytest
from planning_costs import CostTable, typical_costs

from nestrec.pipeline import SCHEDULES, PipelineConfig
from nestrec.pipeline.window_cost_model import overlapped_ms
from nestrec.planning.simulator.program_replay import Mesh, replay
from nestrec.planning.simulator.rehearsal import rehearse
from nestrec.planning.simulator.shared_cores import Hosts, replay_shared

STEPS, PARTS = 8, 4
NOT_SERIAL = (
    "prefetch_rows",
    "train.embedding.intersect",
    "train.embedding.copy_shared_rows",
    "all_reduce_replica_gradients",
)


def record_program(schedule, parts=PARTS):
    return rehearse(PipelineConfig(schedule=schedule), micro_batches=parts, steps=STEPS)


def test_replay_serial_step_is_sum_of_operations():
    cost = typical_costs(PARTS)
    once = sum(v for k, v in cost.items() if k not in NOT_SERIAL)
    many = (PARTS - 1) * sum(
        cost[k] for k in ("exchange_vectors", "forward_backward", "exchange_gradients", "add_gradients")
    )
    done = replay(record_program("serial"), CostTable(cost), Mesh(1, 1))
    assert done.step_s()[0] == pytest.approx(once + many)


def test_replay_frozen_window_matches_window_model():
    vectors, compute, gradients = 0.2, 0.3, 0.15
    cost = {"exchange_vectors": vectors, "forward_backward": compute, "exchange_gradients": gradients}
    done = replay(record_program("frozen_window"), CostTable(cost), Mesh(1, 2))
    assert done.step_s()[0] == pytest.approx(overlapped_ms([compute] * PARTS, [vectors] * PARTS, [gradients] * PARTS))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_replay_parts_add_up_to_step(schedule):
    mesh = Mesh(2, 3)
    done = replay(record_program(schedule), CostTable(typical_costs(PARTS), mesh.world, spread=0.2), mesh)
    for rank in range(mesh.world):
        parts = done.parts(rank)
        assert parts.step_ns == pytest.approx(done.step_s()[rank] * 1e9, abs=100)
        assert min(parts.compute_ns, parts.exposed_lookup_ns, parts.exposed_communication_ns, parts.idle_ns) >= 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_replay_with_enough_cores_equals_simple_replay(schedule):
    mesh = Mesh(2, 2)
    costs = CostTable(typical_costs(PARTS), mesh.world, spread=0.3)
    many = replay(record_program(schedule), costs, mesh)
    few = replay_shared(record_program(schedule), costs, mesh, Hosts(ranks=4, cores=16))
    np.testing.assert_allclose(few.start, many.start, atol=1e-9)
    np.testing.assert_allclose(few.end, many.end, atol=1e-9)
    np.testing.assert_allclose(few.entered, many.entered, atol=1e-9)


def test_replay_ranks_on_one_core_run_sequentially():
    cost = CostTable({"forward_backward": 1.0}, 2)
    alone = replay_shared(record_program("serial", 1), cost, Mesh(1, 2), Hosts(ranks=2, cores=2))
    shared = replay_shared(record_program("serial", 1), cost, Mesh(1, 2), Hosts(ranks=2, cores=1))
    crowded = replay_shared(record_program("serial", 1), cost, Mesh(1, 2), Hosts(ranks=2, cores=1, contention=0.5))
    steps = [done.step_s()[0] for done in (alone, shared, crowded)]
    assert steps == pytest.approx([1.0, 2.0, 3.0])


def test_replay_collective_waits_count_as_idle_time():
    class Uneven(CostTable):
        def of(self, operation, step, micro_batch):
            cost = super().of(operation, step, micro_batch)
            if operation != "forward_backward":
                return cost
            return type(cost)(np.array([1.0, 2.0, 1.0, 1.0]))

    done = replay(record_program("serial", 1), Uneven({"exchange_gradients": 0.5}, 4), Mesh(2, 2))
    gradients = next(i for i, s in enumerate(done.program.stages) if "exchange_gradients" in s.operations)
    assert done.end[gradients].tolist() == pytest.approx([2.5, 2.5, 1.5, 1.5])
    assert done.parts(0).idle_ns == pytest.approx(1e9, abs=10)
    assert done.parts(1).idle_ns == pytest.approx(0, abs=10)


def test_replay_schedules_hide_expected_operations():
    def parts_of(schedule):
        return replay(record_program(schedule), CostTable(typical_costs(PARTS)), Mesh(1, 1)).parts(0)

    serial, nested = parts_of("serial"), parts_of("nested")
    assert parts_of("dual_buffer").exposed_lookup_ns < 0.1 * serial.exposed_lookup_ns
    assert parts_of("frozen_window").exposed_communication_ns < 0.5 * serial.exposed_communication_ns
    assert nested.exposed_lookup_ns < 0.1 * serial.exposed_lookup_ns
    assert nested.step_ns < parts_of("dual_buffer").step_ns < serial.step_ns
