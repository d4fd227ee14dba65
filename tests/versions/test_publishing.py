"""Runs publish versions during training. Published versions equal exports, also after failures and restarts."""

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
from nestrec.exporters.servable_writer import restored_session, servable_from_session
from nestrec.exporters.version_publisher import publish_run
from nestrec.serving.versions.live_version import LiveModelVersion, ModelAddress, open_model
from nestrec.serving.versions.version_store import VersionStore
from support.fail_points import armed
from support.tiny_runs import config_of, make_datasets

POINTS = [
    f"publish.{kind}.{moment}"
    for kind in ("delta", "full")
    for moment in ("before_files", "between_files", "before_manifest", "after_manifest")
] + ["publish.after_newest", "publish.during_pruning"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make_datasets(folder, num_topics=5)
    return folder


def open_newest(address):
    """Open the newest version as a server that starts now does."""
    versions = VersionStore(storage_of(address))
    newest = versions.newest()
    return LiveModelVersion.open(versions, versions.chain_from_full((newest.folder, newest.version)))


def test_publishing_deltas_continue_after_restart(data, tmp_path):
    address = str(tmp_path / "published")
    options = {"publish.address": address, "publish.every_steps": 2, "training.max_steps": 5}
    train(config_of("hstu", data, options), output=tmp_path / "run")
    versions = VersionStore(storage_of(address))
    assert [versions.read_description(*at).step for at in versions.history()] == [5, 4, 2]
    train(config_of("hstu", data, {**options, "training.max_steps": 7}), output=tmp_path / "run")
    manifests = [versions.read_description(*at) for at in versions.history()]
    assert [(manifest.step, manifest.kind) for manifest in manifests] == [
        (7, "delta"), (6, "delta"), (5, "delta"), (4, "delta"), (2, "full"),
    ]  # fmt: skip
    with restored_session(tmp_path / "run", best=False) as (session, step):
        assert_same(open_newest(address).servable, servable_from_session(session, step, tmp_path))
        history = {"items": ["1", "2"], "times_ms": [1, 2], "now_ms": 3}
        items = nestrec.load(tmp_path / "run", best=False).recommend(history=history, k=5)
    assert nestrec.load(address).recommend(history=history, k=5).items == items.items
    manifest = publish_run(tmp_path / "run", address, best=False).manifest
    assert (manifest.version, manifest.step) == (manifests[0].version, 7)  # already published


def test_publishing_after_kill_starts_with_full_version(data, tmp_path):
    address = str(tmp_path / "published")
    options = {"publish.address": address, "publish.every_steps": 1, "training.max_steps": 3}
    train(config_of("hstu", data, options), output=tmp_path / "run")
    more = {**options, "training.max_steps": 6, "training.checkpoint_every_steps": 2}
    with armed("train.step", lambda: sys.exit(1), at=3), pytest.raises(SystemExit):
        train(config_of("hstu", data, more), output=tmp_path / "run")
    for thread in threading.enumerate():  # a killed process would not finish this write; this process does
        if thread.name == "nestrec-checkpoint":
            thread.join()
    versions = VersionStore(storage_of(address))
    assert versions.read_description(*next(versions.history())).step == 5  # the last checkpoint is of step 4
    train(config_of("hstu", data, more), output=tmp_path / "run")
    steps = [versions.read_description(*at) for at in versions.history()]
    assert [(manifest.step, manifest.kind) for manifest in steps] == [(6, "delta"), (5, "full")]
    with restored_session(tmp_path / "run", best=False) as (session, step):
        assert_same(open_newest(address).servable, servable_from_session(session, step, tmp_path))


@pytest.mark.parametrize(("storage", "points"), [("folder", POINTS[3::4]), ("memory", POINTS)])
def test_publishing_failed_version_is_covered_by_next(data, tmp_path, storage, points):
    def fail():
        failed.append(point)
        raise OSError("no space left")

    address = f"memory://{tmp_path}" if storage == "memory" else str(tmp_path / "published")
    run = ChangingRun.begin(Topology.single(), data, address, family="hstu", store="lru", seed=3, full_every_versions=2)
    exported, failed = {}, []
    for point in [None, *points]:
        for attempt in ("first", "second", "third"):
            run.change()
            with armed(point, fail) if point and attempt != "third" else contextlib.nullcontext():
                run.publisher.publish(run.session, run.step)
                run.publisher.close()
            exported[run.step] = run.export(tmp_path)
        found = open_newest(address)
        assert_same(found.servable, exported[found.step.manifest.step])
        assert found.step.manifest.step == run.step
    assert set(failed) == set(points)


def test_publishing_on_full_disk_removes_partial_versions(data, tmp_path):
    """The disk is full in the middle of a rank's files. A later full version also removes the partial files."""
    address = str(tmp_path / "published")
    run = ChangingRun.begin(Topology.single(), data, address, family="hstu", store="lru", seed=3, full_every_versions=2)

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


def test_publishing_by_two_runs_is_detected(data, tmp_path):
    """Each run detects the other. The newest version of either run can be opened, also after old ones were deleted."""
    address = str(tmp_path / "published")
    runs = [
        ChangingRun.begin(
            Topology.single(), data, address, family="hstu", store="lru", seed=seed, full_every_versions=2
        )
        for seed in (1, 2)
    ]
    warnings = []
    for run in runs:
        run.publisher._warn = warnings.append
    numbers = []
    for run in (runs[0], runs[0], runs[1], runs[1], runs[0], runs[0], runs[1]):
        run.change()
        run.publisher.publish(run.session, run.step)
        run.publisher.close()
        found = open_newest(address)
        assert_same(found.servable, run.export(tmp_path))
        numbers.append((found.step.manifest.number, found.step.manifest.parent is None))
    assert numbers == [(1, True), (2, False), (3, True), (4, False), (5, True), (6, False), (7, True)]
    assert len(warnings) == 3
    assert all("of another publisher" in text and "a separate address per run" in text for text in warnings)
    shutil.rmtree(address)
    runs[1].change()
    runs[1].publisher.publish(runs[1].session, runs[1].step)
    runs[1].publisher.close()
    assert_same(open_newest(address).servable, runs[1].export(tmp_path))
    assert "is no version" in warnings[-1]


def test_publishing_unreachable_address_warns_and_continues(data, tmp_path):
    """Regression test: an unreachable store used to end a restarted run with a traceback."""
    address = str(tmp_path / "published")
    run = tmp_path / "run"
    (tmp_path / "published").write_text("a file instead of a folder")
    options = {"training.max_steps": 1, "training.eval_every_epochs": 0, "publish.address": address}
    train(config_of("hstu", data, options), output=run)
    assert (run / "checkpoints" / "step-00000001").exists()
    with pytest.raises(UserError, match=r"(?s)ADDRESS.*cannot continue from.*could not be written"):
        publish_run(run, address)


def test_publishing_retention_keeps_parents_of_newer_versions(data, tmp_path):
    address = str(tmp_path / "published")
    run = ChangingRun.begin(Topology.single(), data, address, family="hstu", store="lru", seed=1, full_every_versions=3)
    for _ in range(14):
        run.change()
        run.publisher.publish(run.session, run.step)
        run.publisher.close()
    versions = VersionStore(storage_of(address))
    numbers = sorted(int(name.partition("-")[0]) for name in versions.storage.list_folders("versions"))
    assert numbers == list(range(numbers[0], 15))
    assert 14 - numbers[0] + 1 <= 6 + 3
    for at in versions.history():  # a server can be pinned to any of the newest six
        if versions.read_description(*at).number >= 9:
            LiveModelVersion.open(versions, versions.chain_from_full(at))


def test_publishing_retention_includes_earlier_starts(data, tmp_path):
    """A start that does not know the changes since the last version publishes a full version, without a parent."""
    address = str(tmp_path / "published")
    versions = VersionStore(storage_of(address))
    exported = {}
    for start in range(6):
        run = ChangingRun.begin(
            Topology.single(), data, address, family="hstu", store="lru", seed=start, full_every_versions=1
        )  # retention: four versions
        for _ in range(2):
            run.change()
            run.publisher.publish(run.session, run.step)
            run.publisher.close()
            exported[run.publisher.newest.manifest.version] = run.export(tmp_path)
    retained = list(versions.published())
    assert [version for _, version in retained] == list(exported)[:-5:-1]
    assert sorted(versions.storage.list_folders("versions")) == sorted(folder for folder, _ in retained)
    for _, version in retained:
        assert_same(open_model(ModelAddress(address, version[:12])).servable, exported[version])


def test_publishing_requires_servable_task(data, tmp_path):
    cfg = config_of("rows", data, {"publish.address": str(tmp_path / "published"), "training.max_steps": 1})
    with pytest.raises(UserError, match="cannot be published"):
        train(cfg, output=tmp_path / "run")
