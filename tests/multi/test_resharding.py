"""Tables saved by four ranks load on any other number of ranks."""

import pytest
from engine_jobs import load, save

from nestrec.distributed import Topology


@pytest.fixture(scope="module")
def saved_on_4(pools, tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    return folder, pools[4].run(save, str(folder))[0]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_tables_load_on_other_number_of_ranks(pools, saved_on_4, world, tmp_path):
    folder, digests = saved_on_4

    def load_on(world: int, source: str, target: str | None) -> list:
        if world == 1:
            return [load(Topology.single(), source, target)]
        return pools[world].run(load, source, target)

    results = load_on(world, str(folder), str(tmp_path))
    back_on_4 = load_on(4, str(tmp_path), None)
    direct = load_on(4, str(folder), None)
    assert all(result[0] == digests for result in [*results, *back_on_4])
    assert back_on_4[0][1] == direct[0][1]
    assert results[0][1] == pytest.approx(direct[0][1], rel=1e-12)
    assert [sum(r[2][t] for r in results) for t in (0, 1)] == [sum(r[2][t] for r in direct) for t in (0, 1)]
