"""A table saved by some ranks is the same table on any other number of ranks."""

import pytest
from engine_jobs import load, save

from nestrec.distributed import Topology


@pytest.fixture(scope="module")
def saved_on_4(pools, tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    return folder, pools[4].run(save, str(folder))[0]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_loading_on_another_number_of_ranks_keeps_the_digest(pools, saved_on_4, world, tmp_path):
    folder, digests = saved_on_4

    def on(world: int, source: str, target: str | None) -> list:
        if world == 1:
            return [load(Topology.single(), source, target)]
        return pools[world].run(load, source, target)

    results = on(world, str(folder), str(tmp_path))
    back = on(4, str(tmp_path), None)
    undisturbed = on(4, str(folder), None)
    assert all(result[0] == digests for result in [*results, *back])
    assert back[0][1] == undisturbed[0][1]
    assert results[0][1] == pytest.approx(undisturbed[0][1], rel=1e-12)
    assert [sum(r[2][t] for r in results) for t in (0, 1)] == [sum(r[2][t] for r in undisturbed) for t in (0, 1)]
