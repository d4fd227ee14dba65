"""Cluster files: those that come along load, and mistakes name their field."""

import pytest

from nestrec.base.errors import UserError
from nestrec.planning.cluster_config import cluster_names, cluster_of, load_cluster, parse, this_machine
from nestrec.planning.plan_constraints import candidate_of, check_fits
from nestrec.training.recipes import RECIPES


@pytest.mark.parametrize("name", cluster_names())
def test_a_shipped_cluster_loads(name):
    cluster = load_cluster(name)
    assert cluster.world == cluster.hosts * cluster.host.ranks
    assert cluster.links[-1].ranks == 0
    assert cluster.profile.compute.flop_s > 0


def test_the_shipped_clusters_are_the_documented_ones():
    assert cluster_names() == ["cpu-hosts", "h100-ib400"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hosts": 0}, "hosts"),
        ({"hosts": "many"}, "hosts"),
        ({"links": []}, "links"),
        ({"hots": 3}, "hots"),
        ({"links": [{"name": "fabric", "ranks": 0, "gb_per_s": float("nan")}]}, "gb_per_s"),
        ({"links": [{"name": "fabric", "ranks": 0, "gb_per_s": 1.0, "latency_us": -1.0}]}, "latency_us"),
        ({"device": {"kind": "cpu", "memory_gib": float("nan"), "peak_tflops": 1.0}}, "device.memory_gib"),
        ({"device": {"kind": "cpu", "memory_gib": 1.0, "peak_tflops": 0.0}}, "device.peak_tflops"),
        ({"profile": {"copy": {"unit_s": -1e-9}}}, "profile.copy.unit_s"),
    ],
)
def test_a_mistake_names_its_field(change, field):
    from importlib import resources

    text = (resources.files("nestrec.planning") / "clusters" / "cpu-hosts.toml").read_text()
    with pytest.raises(UserError, match=field):
        cluster_of({**parse(text, "cpu-hosts"), **change})


def test_unknown_names_and_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="h100-ib400"):
        load_cluster("h100-ib40")
    with pytest.raises(UserError, match="no such file"):
        load_cluster("nowhere.toml")
    with pytest.raises(UserError, match="TOML"):
        parse("hosts = ", "x.toml")
    (tmp_path / "latin.toml").write_bytes("name = 'Zürich'".encode("latin-1"))
    (tmp_path / "folder.toml").mkdir()
    for name in ("latin.toml", "folder.toml"):
        with pytest.raises(UserError, match="cannot be read"):
            load_cluster(str(tmp_path / name))


def test_this_machine_is_a_cluster_of_one():
    cluster = this_machine(uses_cuda=False)
    assert cluster.world == 1
    assert cluster.device.memory_gib > 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_a_candidate_of_its_own(recipe):
    assert candidate_of(RECIPES[recipe]()).micro_batches >= 1


def test_a_run_that_does_not_fit_is_refused_with_a_remedy():
    from planning_workloads import gpu_cluster, workload

    with pytest.raises(UserError, match="short by") as caught:
        check_fits(RECIPES["demo"](), workload(rows=10**10, batch_samples=64), gpu_cluster(hosts=1))
    assert "store=" in caught.value.remedy
