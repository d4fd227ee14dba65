"""Kills and damaged, missing, copied or outdated files never bring a wrong version into service."""

import pytest
from fault_injector import FaultInjector
from served_run import serving

from support.tiny_runs import make_datasets


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make_datasets(folder, num_topics=5)
    return folder


SELECTED_FAULTS = [
    "byte of a delta file changed",
    "publisher killed at publish.delta.before_manifest",
    "version missing",
    "server fails at follow.between_tables",
    "version overwritten with an earlier one",
    "trainer killed between two versions",
]


def test_version_faults_never_serve_wrong_version(data, tmp_path):
    with serving(data, tmp_path, "hstu") as served:
        injector = FaultInjector(served, seed=1)
        assert list(injector.run(len(SELECTED_FAULTS), SELECTED_FAULTS)) == SELECTED_FAULTS
        injector.check_recovery()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["hstu", "ranking"])
def test_version_faults_200_never_serve_wrong_version(data, tmp_path, family):
    with serving(data, tmp_path, family) as served:
        injector = FaultInjector(served, seed=2)
        list(injector.run(200))
        assert set(injector.counts) == set(injector.faults)
        injector.check_recovery()
