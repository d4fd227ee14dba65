"""Whatever is killed, damaged, missing, doubled or out of order: never is a wrong version in service."""

import pytest
from faulty_run import FaultyRun
from served_run import serving

from support.tiny_runs import make_datasets


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make_datasets(folder, num_topics=5)
    return folder


FEW = [
    "a byte of a file of a delta changed",
    "publisher killed at publish.delta.before_manifest",
    "a version missing",
    "server fails at follow.between_tables",
    "a version doubled in another's place",
    "trainer killed between two versions",
]


def test_a_wrong_version_is_never_in_service(data, tmp_path):
    with serving(data, tmp_path, "hstu") as served:
        faulty = FaultyRun(served, seed=1)
        assert list(faulty.run(len(FEW), FEW)) == FEW
        faulty.heal()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["hstu", "ranking"])
def test_a_wrong_version_is_never_in_service_over_two_hundred_faults(data, tmp_path, family):
    with serving(data, tmp_path, family) as served:
        faulty = FaultyRun(served, seed=2)
        list(faulty.run(200))
        assert set(faulty.done) == set(faulty.faults)
        faulty.heal()
