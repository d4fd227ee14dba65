"""Chance and buckets: ratios come from the nearest amounts, and what passes a link after a pause is free."""

import numpy as np
import pytest
from planning_costs import TableOfCosts

from nestrec.pipeline import PipelineConfig
from nestrec.planning.simulator.program_replay import Cost, Mesh, replay
from nestrec.planning.simulator.rehearsal import rehearse
from nestrec.planning.simulator.shared_cores import Hosts, replay_shared
from nestrec.planning.simulator.step_costs import RandomizedCosts, ScaledCosts, Spread


def test_ratios_are_drawn_from_measurements_of_about_the_same_amount():
    spread = Spread.of(np.array([4.0, 1.0, 3.0, 2.0]), np.array([40.0, 10.0, 30.0, 20.0]))
    draw = np.random.default_rng(0)
    assert set(spread.draw(1.0, draw, 50)) == {10.0}
    assert set(spread.draw(100.0, draw, 50)) == {40.0}


def test_work_varies_by_rank_and_what_crosses_for_all_alike():
    ratios = Spread.of(np.zeros(100), np.linspace(0.5, 1.5, 100))
    costs = TableOfCosts({"forward_backward": 1.0, "exchange_vectors": 1.0}, world=4)
    varied = RandomizedCosts(costs, {"forward_backward": ratios, "exchange_vectors": ratios}, 4, wire_speed=1.0, seed=0)
    assert len(set(varied.of("forward_backward", 1, 0).busy_s)) > 1
    assert np.ndim(varied.of("exchange_vectors", 1, 0).wire_s) == 0
    again = RandomizedCosts(costs, {"exchange_vectors": ratios}, 4, wire_speed=1.0, seed=0)
    assert again.of("exchange_vectors", 1, 0) == varied.of("exchange_vectors", 1, 0)
    assert again.of("exchange_vectors", 2, 0) != varied.of("exchange_vectors", 1, 0)


class Bucket:
    """Computation of 1, vectors and gradients of 0.5 each; 0.3 of a link's time pass at no cost after a pause."""

    def of(self, operation, step, micro_batch):
        if operation in ("exchange_vectors", "exchange_gradients"):
            return Cost(0.0, 0.5, "shards", latency_s=0.01, burst_s=0.3)
        return Cost(1.0 if operation == "forward_backward" else 0.0)


@pytest.mark.parametrize("shared", [False, True])
def test_a_full_bucket_passes_at_no_cost_and_an_empty_one_does_not(shared):
    program = rehearse(PipelineConfig(schedule="serial"), micro_batches=1, steps=4)
    mesh = Mesh(1, 2)
    done = (
        replay_shared(program, Bucket(), mesh, Hosts(ranks=2, cores=8)) if shared else replay(program, Bucket(), mesh)
    )
    # Gradients find a full bucket after the computation; the vectors that follow them find next to nothing in it.
    free = 0.2 + 0.01
    paid = 0.5 - 0.01 + 0.01
    assert done.step_s()[0] == pytest.approx(1.0 + free + paid, abs=1e-9)


def test_slowed_work_takes_longer_and_links_do_not():
    slowed = ScaledCosts(TableOfCosts({"forward_backward": 1.0, "exchange_vectors": 1.0}), 3.0)
    assert slowed.of("forward_backward", 1, 0).busy_s == pytest.approx(3.0)
    assert slowed.of("exchange_vectors", 1, 0).wire_s == 1.0
