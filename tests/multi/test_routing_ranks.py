"""Keys of any value are routed to their owners and back, from ranks with many keys, few or none."""

import numpy as np
import pytest
from engine_jobs import route_round_trip

LIMITS = [0, -1, 1, 2**63 - 1, -(2**63), 2**32, -(2**32)]
CASES = {
    "empty ranks": [[[1, 2, 3], []], [[], []], [[], [5]], [[], []]],
    "no keys": [[[], []]] * 4,
    "one hot key": [[[7] * 50, [7]], [[7], [7] * 3], [[7] * 2, [7]], [[7], []]],
    "all duplicates": [[[1, 1, 2, 2], [2, 2]], [[2, 2], [1, 1, 1]], [[1, 2, 1], []], [[2], [1]]],
    "int64 limits": [[LIMITS, LIMITS[::-1]], [LIMITS * 2, []], [[], LIMITS], [LIMITS[2:5], LIMITS[:2]]],
}


@pytest.mark.parametrize("name", CASES)
def test_routing_round_trip(pools, name):
    keys = CASES[name]
    owned = pools[4].run(route_round_trip, keys, 2)
    assert sum(owned) == len({k for rank in keys for part in rank for k in part})


@pytest.mark.parametrize("seed", range(12))
def test_routing_round_trip_of_random_keys(pools, seed):
    draw = np.random.default_rng(seed)
    num_micro_batches = int(draw.integers(1, 4))
    spread = int(2 ** draw.integers(0, 62))
    keys = [
        [draw.integers(-spread, spread, draw.integers(0, 40)).tolist() for _ in range(num_micro_batches)]
        for _ in range(4)
    ]
    owned = pools[4].run(route_round_trip, keys, num_micro_batches)
    assert sum(owned) == len({k for rank in keys for part in rank for k in part})
