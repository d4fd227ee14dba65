"""Runs publish versions as they go on: in the end they hold what an export holds, whatever happens on the way."""

import contextlib
import shutil
import sys
import threading

import pytest
from changing_run import ChangingRun, assert_same

import nestrec
from nestrec.api import train
from nestrec.artifacts.storage import storage_of
from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.exporters.servable_writer import restored_session, servable_of_session
from nestrec.exporters.version_publisher import publish_run
from nestrec.serving.versions.live_version import LiveModelVersion, ModelAddress, open_source
from nestrec.serving.versions.version_store import VersionStore
from support.fail_points import armed
from support.tiny_runs import config_of, make_datasets

POINTS = [
    f"publish.{kind}.{place}"
    for kind in ("delta", "full")
    for place in ("before_files", "between_files", "before_manifest", "after_manifest")
] + ["publish.after_newest", "publish.during_pruning"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make_datasets(folder, num_topics=5)
    return folder


def followed_at(address):
    versions = VersionStore(storage_of(address))
    newest = versions.newest()
    return LiveModelVersion.open(versions, versions.way_from_full((newest.folder, newest.version)))


def test_training_publishes_deltas_and_goes_on_with_them_when_started_again(data, tmp_path):
    address = str(tmp_path / "published")
    options = {"publish.address": address, "publish.every_steps": 2, "training.max_steps": 5}
    train(config_of("hstu", data, options), output=tmp_path / "run")
    versions = VersionStore(storage_of(address))
    assert [versions.told(*at).step for at in versions.history()] == [5, 4, 2]
    train(config_of("hstu", data, {**options, "training.max_steps": 7}), output=tmp_path / "run")
    told = [versions.told(*at) for at in versions.history()]
    assert [(manifest.step, manifest.kind) for manifest in told] == [
        (7, "delta"), (6, "delta"), (5, "delta"), (4, "delta"), (2, "full"),
    ]  # fmt: skip
    with restored_session(tmp_path / "run", best=False) as (session, step):
        assert_same(followed_at(address).servable, servable_of_session(session, step, tmp_path))
        history = {"items": ["1", "2"], "times_ms": [1, 2], "now_ms": 3}
        items = nestrec.load(tmp_path / "run", best=False).recommend(history=history, k=5)
    assert nestrec.load(address).recommend(history=history, k=5).items == items.items
    manifest = publish_run(tmp_path / "run", address, best=False).manifest
    assert (manifest.version, manifest.step) == (told[0].version, 7)  # it is there already


def test_a_run_that_was_killed_after_a_version_begins_with_a_full_one(data, tmp_path):
    address = str(tmp_path / "published")
    options = {"publish.address": address, "publish.every_steps": 1, "training.max_steps": 3}
    train(config_of("hstu", data, options), output=tmp_path / "run")
    more = {**options, "training.max_steps": 6, "training.checkpoint_every_steps": 2}
    with armed("train.step", lambda: sys.exit(1), at=3), pytest.raises(SystemExit):
        train(config_of("hstu", data, more), output=tmp_path / "run")
    for thread in threading.enumerate():  # what a killed process would not have gone on writing is written here
        if thread.name == "nestrec-checkpoint":
            thread.join()
    versions = VersionStore(storage_of(address))
    assert versions.told(*next(versions.history())).step == 5  # the last checkpoint is of step 4
    train(config_of("hstu", data, more), output=tmp_path / "run")
    steps = [versions.told(*at) for at in versions.history()]
    assert [(manifest.step, manifest.kind) for manifest in steps] == [(6, "delta"), (5, "full")]
    with restored_session(tmp_path / "run", best=False) as (session, step):
        assert_same(followed_at(address).servable, servable_of_session(session, step, tmp_path))


@pytest.mark.parametrize(("kind_of_address", "points"), [("folder", POINTS[3::4]), ("memory", POINTS)])
def test_a_version_that_cannot_be_written_is_made_up_for_by_the_next(data, tmp_path, kind_of_address, points):
    def fail():
        failed.append(point)
        raise OSError("no space left")

    address = f"memory://{tmp_path}" if kind_of_address == "memory" else str(tmp_path / "published")
    run = ChangingRun.begin(Topology.single(), data, address, family="hstu", store="lru", seed=3, snapshot_every=2)
    exported, failed = {}, []
    for point in [None, *points]:
        for attempt in ("first", "second", "third"):
            run.change()
            with armed(point, fail) if point and attempt != "third" else contextlib.nullcontext():
                run.publisher.publish(run.session, run.step)
                run.publisher.close()
            exported[run.step] = run.export(tmp_path)
        found = followed_at(address)
        assert_same(found.servable, exported[found.step.manifest.step])
        assert found.step.manifest.step == run.step
    assert set(failed) == set(points)


def test_a_full_disk_is_not_filled_further_by_versions_that_do_not_fit(data, tmp_path):
    """In the middle of a rank's files: what there is of them goes, also where the version is told in full again."""
    address = str(tmp_path / "published")
    run = ChangingRun.begin(Topology.single(), data, address, family="hstu", store="lru", seed=3, snapshot_every=2)

    def fail():
        raise OSError("no space left")

    def publish():
        run.change()
        run.publisher.publish(run.session, run.step)
        run.publisher.close()

    publish()
    with armed("publish.delta.between_files", fail):
        publish()
    publish()
    with armed("publish.full.between_files", fail):
        publish()
    versions = VersionStore(storage_of(address))
    folders = sorted((tmp_path / "published" / "versions").iterdir())
    assert [folder.name for folder in folders] == sorted(folder for folder, _ in versions.history())
    for folder in folders:
        kinds = {file.name.partition("-")[0] for file in folder.iterdir() if file.suffix == ".safetensors"}
        assert kinds == {file.stem for file in folder.iterdir() if "-" not in file.stem}


def test_two_publishers_at_one_address_are_told_and_no_version_builds_on_what_is_gone(data, tmp_path):
    """Each is seen by the other, and what is the newest can be opened whoever wrote it, old versions deleted or not."""
    address = str(tmp_path / "published")
    runs = [
        ChangingRun.begin(Topology.single(), data, address, family="hstu", store="lru", seed=seed, snapshot_every=2)
        for seed in (1, 2)
    ]
    told = []
    for run in runs:
        run.publisher._warn = told.append
    numbers = []
    for run in (runs[0], runs[0], runs[1], runs[1], runs[0], runs[0], runs[1]):
        run.change()
        run.publisher.publish(run.session, run.step)
        run.publisher.close()
        found = followed_at(address)
        assert_same(found.servable, run.export(tmp_path))
        numbers.append((found.step.manifest.number, found.step.manifest.parent is None))
    assert numbers == [(1, True), (2, False), (3, True), (4, False), (5, True), (6, False), (7, True)]
    assert len(told) == 3
    assert all("of another publisher" in text and "an address of its own" in text for text in told)
    shutil.rmtree(address)
    runs[1].change()
    runs[1].publisher.publish(runs[1].session, runs[1].step)
    runs[1].publisher.close()
    assert_same(followed_at(address).servable, runs[1].export(tmp_path))
    assert "nothing any more" in told[-1]


def test_an_address_that_cannot_be_asked_is_told_of_and_training_goes_on(data, tmp_path):
    """A store that was away when a run was started again ended it with a traceback."""
    address = str(tmp_path / "published")
    run = tmp_path / "run"
    (tmp_path / "published").write_text("a file where a folder is to be")
    options = {"training.max_steps": 1, "training.evaluate_every_epochs": 0, "publish.address": address}
    train(config_of("hstu", data, options), output=run)
    assert (run / "checkpoints" / "step-00000001").exists()
    with pytest.raises(UserError, match=r"(?s)ADDRESS.*cannot be gone on from.*could not be written"):
        publish_run(run, address)


def test_old_versions_go_and_those_that_newer_ones_build_on_stay(data, tmp_path):
    address = str(tmp_path / "published")
    run = ChangingRun.begin(Topology.single(), data, address, family="hstu", store="lru", seed=1, snapshot_every=3)
    for _ in range(14):
        run.change()
        run.publisher.publish(run.session, run.step)
        run.publisher.close()
    versions = VersionStore(storage_of(address))
    kept = sorted(int(name.partition("-")[0]) for name in versions.storage.list_folders("versions"))
    assert kept == list(range(kept[0], 15))
    assert 14 - kept[0] + 1 <= 6 + 3
    for at in versions.history():  # a server can be pinned to any of the newest six
        if versions.told(*at).number >= 9:
            LiveModelVersion.open(versions, versions.way_from_full(at))


def test_versions_of_earlier_starts_can_be_gone_back_to_and_go_in_their_turn(data, tmp_path):
    """Each start that does not know what changed publishes in full: its versions build on none of those before."""
    address = str(tmp_path / "published")
    versions = VersionStore(storage_of(address))
    exported = {}
    for start in range(6):
        run = ChangingRun.begin(
            Topology.single(), data, address, family="hstu", store="lru", seed=start, snapshot_every=1
        )  # four are kept
        for _ in range(2):
            run.change()
            run.publisher.publish(run.session, run.step)
            run.publisher.close()
            exported[run.publisher.newest.manifest.version] = run.export(tmp_path)
    kept = list(versions.published())
    assert [version for _, version in kept] == list(exported)[:-5:-1]
    assert sorted(versions.storage.list_folders("versions")) == sorted(folder for folder, _ in kept)
    for _, version in kept:
        assert_same(open_source(ModelAddress(address, version[:12])).servable, exported[version])


def test_a_run_without_a_form_for_serving_does_not_begin_to_publish(data, tmp_path):
    cfg = config_of("rows", data, {"publish.address": str(tmp_path / "published"), "training.max_steps": 1})
    with pytest.raises(UserError, match="cannot be published"):
        train(cfg, output=tmp_path / "run")
