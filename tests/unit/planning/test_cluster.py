"""Cluster files: built-in files load, and errors name the invalid field."""

import pytest

from nestrec.base.errors import UserError
from nestrec.planning.cluster_config import cluster_from_dict, cluster_names, load_cluster, parse, this_machine
from nestrec.planning.plan_constraints import candidate_from_config, check_fits
from nestrec.training.recipes import RECIPES


@pytest.mark.parametrize("name", cluster_names())
def test_cluster_built_in_files_load(name):
    cluster = load_cluster(name)
    assert cluster.world == cluster.hosts * cluster.host.ranks
    assert cluster.links[-1].ranks == 0
    assert cluster.profile.compute.flop_s > 0


def test_cluster_built_in_files_are_documented():
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
def test_cluster_file_error_names_field(change, field):
    from importlib import resources

    text = (resources.files("nestrec.planning") / "clusters" / "cpu-hosts.toml").read_text()
    with pytest.raises(UserError, match=field):
        cluster_from_dict({**parse(text, "cpu-hosts"), **change})


def test_cluster_unknown_names_and_files_are_rejected(tmp_path):
    with pytest.raises(UserError, match="h100-ib400"):
        load_cluster("h100-ib40")
    with pytest.raises(UserError, match="the file does not exist"):
        load_cluster("nowhere.toml")
    with pytest.raises(UserError, match="TOML"):
        parse("hosts = ", "x.toml")
    (tmp_path / "latin.toml").write_bytes("name = 'Zürich'".encode("latin-1"))
    (tmp_path / "folder.toml").mkdir()
    for name in ("latin.toml", "folder.toml"):
        with pytest.raises(UserError, match="cannot be read"):
            load_cluster(str(tmp_path / name))


def test_cluster_of_this_machine_has_one_host():
    cluster = this_machine(uses_cuda=False)
    assert cluster.world == 1
    assert cluster.device.memory_gib > 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_plan_candidate_exists_for_every_recipe(recipe):
    assert candidate_from_config(RECIPES[recipe]()).micro_batches >= 1


def test_plan_only_rejects_run_that_does_not_fit():
    from planning_workloads import gpu_cluster, workload

    with pytest.raises(UserError, match="short by") as caught:
        check_fits(RECIPES["demo"](), workload(rows=10**10, batch_samples=64), gpu_cluster(hosts=1))
    assert "store=" in caught.value.remedy
