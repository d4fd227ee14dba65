"""Random variation and token buckets: ratios come from similar amounts, and the first bytes after a pause are free."""

import numpy as np
import pytest
from planning_costs import CostTable

from nestrec.pipeline import PipelineConfig
from nestrec.planning.simulator.program_replay import Cost, Mesh, replay
from nestrec.planning.simulator.rehearsal import rehearse
from nestrec.planning.simulator.shared_cores import Hosts, replay_shared
from nestrec.planning.simulator.step_costs import RandomizedCosts, ScaledCosts, Spread


def test_variation_draws_ratios_of_similar_amounts():
    spread = Spread.of(np.array([4.0, 1.0, 3.0, 2.0]), np.array([40.0, 10.0, 30.0, 20.0]))
    draw = np.random.default_rng(0)
    assert set(spread.draw(1.0, draw, 50)) == {10.0}
    assert set(spread.draw(100.0, draw, 50)) == {40.0}


def test_variation_differs_by_rank_except_for_collectives():
    ratios = Spread.of(np.zeros(100), np.linspace(0.5, 1.5, 100))
    costs = CostTable({"forward_backward": 1.0, "exchange_vectors": 1.0}, world=4)
    varied = RandomizedCosts(costs, {"forward_backward": ratios, "exchange_vectors": ratios}, 4, wire_speed=1.0, seed=0)
    assert len(set(varied.of("forward_backward", 1, 0).busy_s)) > 1
    assert np.ndim(varied.of("exchange_vectors", 1, 0).wire_s) == 0
    again = RandomizedCosts(costs, {"exchange_vectors": ratios}, 4, wire_speed=1.0, seed=0)
    assert again.of("exchange_vectors", 1, 0) == varied.of("exchange_vectors", 1, 0)
    assert again.of("exchange_vectors", 2, 0) != varied.of("exchange_vectors", 1, 0)


class Bucket:
    """Costs of 1 for computation and 0.5 for vectors and gradients; the first 0.3 after a pause of the link is free."""

    def of(self, operation, step, micro_batch):
        if operation in ("exchange_vectors", "exchange_gradients"):
            return Cost(0.0, 0.5, "shards", latency_s=0.01, burst_s=0.3)
        return Cost(1.0 if operation == "forward_backward" else 0.0)


@pytest.mark.parametrize("shared", [False, True])
def test_token_bucket_of_limited_link(shared):
    program = rehearse(PipelineConfig(schedule="serial"), micro_batches=1, steps=4)
    mesh = Mesh(1, 2)
    done = (
        replay_shared(program, Bucket(), mesh, Hosts(ranks=2, cores=8)) if shared else replay(program, Bucket(), mesh)
    )
    # The bucket is full for the gradients after the computation, and nearly empty for the vectors after them.
    free = 0.2 + 0.01
    paid = 0.5 - 0.01 + 0.01
    assert done.step_s()[0] == pytest.approx(1.0 + free + paid, abs=1e-9)


def test_scaled_costs_apply_to_compute_but_not_links():
    slowed = ScaledCosts(CostTable({"forward_backward": 1.0, "exchange_vectors": 1.0}), 3.0)
    assert slowed.of("forward_backward", 1, 0).busy_s == pytest.approx(3.0)
    assert slowed.of("exchange_vectors", 1, 0).wire_s == 1.0
