"""The plan for four ranks runs on four ranks, and its result equals that of `serial`."""

from dataclasses import replace
from pathlib import Path

import pytest
from training_jobs import train

from nestrec.planning.cluster_config import load_cluster
from nestrec.planning.plan import make_plan
from nestrec.planning.recipe_workload import measure_workload
from nestrec.tasks.task_registry import store_option
from support.tiny_runs import config_of, make_datasets

SHORT = {"training.max_steps": 4, "training.epochs": 1000, "training.eval_every_epochs": 0}


@pytest.mark.timeout(300)
def test_plan_result_runs_on_four_ranks_and_equals_serial(pools, tmp_path: Path):
    make_datasets(tmp_path)
    cfg = config_of("hstu", tmp_path, SHORT)
    base = load_cluster("cpu-hosts")
    cluster = replace(base, hosts=1, host=replace(base.host, ranks=4, cores=4))
    best = make_plan(measure_workload(cfg), cluster).best
    assert best is not None
    plan = {**SHORT, **best.candidate.overrides(), store_option(cfg.task): best.candidate.store}
    planned = pools[4].run(train, "hstu", str(tmp_path), str(tmp_path / "planned"), plan)
    serial = {**plan, "pipeline.schedule": "serial"}
    reference = pools[4].run(train, "hstu", str(tmp_path), str(tmp_path / "serial"), serial)
    assert planned[0]["state"].step == 4
    assert [rank["digests"] for rank in planned] == [rank["digests"] for rank in reference]
