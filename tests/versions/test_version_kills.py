"""A run that publishes is killed with SIGKILL at every place of publishing, one after the other, and started again."""

import threading

import pytest
from changing_run import assert_same
from faulty_run import PUBLISHING

from nestrec.exporters.servable_writer import restored_session, servable_of_session
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec.serving.service.version_follower import VersionFollowConfig, VersionFollower
from nestrec.serving.versions.live_version import open_source, source_of
from support.fault_runner import FailPoint, run_with_faults
from support.tiny_runs import command_of, make_datasets


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_is_killed_as_it_publishes_leads_its_servers_to_the_same_model(tmp_path):
    make_datasets(tmp_path)
    address = tmp_path / "published"
    run = tmp_path / "run"
    options = {
        "publish.address": address,
        "publish.every_steps": 1,
        "publish.snapshot_every": 2,
        "publish.keep": 3,
        "training.max_steps": 60,
        "training.checkpoint_every_steps": 2,
    }
    faults = [FailPoint(f"{point}@{2 if 'before' in point else 1}=kill") for point in PUBLISHING]
    seen = []
    is_over = threading.Event()

    def follow():
        while not (address / "newest.json").exists():
            is_over.wait(0.05)
        source = source_of(str(address))
        followed = open_source(source)
        service = Service({"retrieval": followed.servable}, ServiceConfig())
        follower = VersionFollower(service, "retrieval", followed, source, VersionFollowConfig())
        while not is_over.wait(0.05):
            follower.look()
            seen.append(follower.number)
        assert follower.look(), follower.counts.problem
        with restored_session(run, best=False) as (session, step):
            assert_same(service.fleet("retrieval").servable, servable_of_session(session, step, tmp_path))
        seen.append("same")
        service.close()

    following = threading.Thread(target=follow)
    following.start()
    try:
        history = run_with_faults(command_of("hstu", tmp_path, run, options), faults, limit_s=120)
    finally:
        is_over.set()
        following.join()
    assert sum(attempt.num_fired for attempt in history) == len(faults)
    assert seen[-1] == "same"
    assert seen[:-1] == sorted(seen[:-1]), "a server never goes back by itself"
