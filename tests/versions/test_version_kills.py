"""A run that publishes versions is killed with SIGKILL at every fail point of publishing in turn, and restarted."""

import threading

import pytest
from changing_run import assert_same
from fault_injector import PUBLISHING

from nestrec.exporters.servable_writer import restored_session, servable_from_session
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec.serving.service.version_follower import VersionFollowConfig, VersionFollower
from nestrec.serving.versions.live_version import open_model, parse_model_address
from support.fault_runner import FailPoint, run_with_faults
from support.tiny_runs import command_of, make_datasets


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_version_publisher_kill_leads_to_same_model(tmp_path):
    make_datasets(tmp_path)
    address = tmp_path / "published"
    run = tmp_path / "run"
    options = {
        "publish.address": address,
        "publish.every_steps": 1,
        "publish.full_every_versions": 2,
        "publish.max_versions": 3,
        "training.max_steps": 60,
        "training.checkpoint_every_steps": 2,
    }
    faults = [FailPoint(f"{point}@{2 if 'before' in point else 1}=kill") for point in PUBLISHING]
    version_numbers = []
    final_models_equal = []
    is_over = threading.Event()

    def follow():
        while not (address / "newest.json").exists():
            is_over.wait(0.05)
        source = parse_model_address(str(address))
        followed = open_model(source)
        service = Service({"retrieval": followed.servable}, ServiceConfig())
        follower = VersionFollower(service, "retrieval", followed, source, VersionFollowConfig())
        while not is_over.wait(0.05):
            follower.poll()
            version_numbers.append(follower.version_number)
        assert follower.poll(), follower.counts.problem
        with restored_session(run, best=False) as (session, step):
            assert_same(service.deployment("retrieval").servable, servable_from_session(session, step, tmp_path))
        final_models_equal.append(True)
        service.close()

    follower_thread = threading.Thread(target=follow)
    follower_thread.start()
    try:
        history = run_with_faults(command_of("hstu", tmp_path, run, options), faults, limit_s=120)
    finally:
        is_over.set()
        follower_thread.join()
    assert sum(attempt.num_fired for attempt in history) == len(faults)
    assert final_models_equal == [True]
    assert version_numbers == sorted(version_numbers), "a follower never moves to an earlier version"
