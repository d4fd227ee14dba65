"""Servers that follow published versions: each response comes from the version that it names, also if deltas fail."""

import asyncio
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from changing_run import ChangingRun, assert_same
from frontend_processes import wait_for
from served_run import serving
from server_process import running_server
from test_rollout import behind_gateway

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.exporters.servable_writer import write_servable
from nestrec.inference.recommender import Recommender
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.fleet.rolling_update import FleetVersionFollower
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import short_version
from nestrec.serving.model.served_tables import TablesConfig
from nestrec.serving.service.cold_start_items import NewItem, NewItemInsertion, add_items
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec.serving.service.model_reloader import Reloader
from nestrec.serving.service.version_follower import VersionFollowConfig
from nestrec.serving.versions.live_version import ModelAddress, StagedVersion, open_model
from nestrec.serving.versions.version_manifest import Times
from nestrec.serving.versions.version_store import VersionStore
from support.fail_points import armed
from support.tiny_runs import make_datasets

LIMITS = LimitsConfig(default_timeout_ms=10_000, expose_cache_source=True)
FOLLOW = VersionFollowConfig(enabled=True, mode="manual")
HISTORY = {"items": ["1", "2", "3"], "times_ms": [1, 2, 3], "actions": [1, 0, 1]}
REQUEST = {"user": "ann", "history": HISTORY, "candidates": ["4", "5", "6", "29"], "now_ms": 4}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make_datasets(folder, num_topics=5)
    return folder


@pytest.mark.parametrize(
    ("family", "instances", "tables"),
    [("hstu", 1, None), ("ranking", 2, None), ("ranking", 1, TablesConfig(store="dram", cache_rows=8))],
)
def test_served_version_responses_match_named_version(data, tmp_path, family, instances, tables):
    with serving(data, tmp_path, family, instances, tables) as served:
        responses = []
        is_over = threading.Event()

        async def send_until_over():
            async with served.client() as client:
                users = [f"user {number}" for number in range(6)]
                is_last = False
                while not is_last or len(responses) < 30:
                    is_last = is_over.is_set()  # so that one round follows the last version
                    pending = [client.post("/v1/rank", json={**REQUEST, "user": user}) for user in users]
                    responses.extend(await asyncio.gather(*pending))

        client_thread = threading.Thread(target=lambda: asyncio.run(send_until_over()))
        client_thread.start()
        wait_for(lambda: responses)
        for _ in range(9):
            served.publish()
            assert served.follower.poll(), served.follower.counts.problem
            served.check()
        is_over.set()
        client_thread.join()
        assert (served.follower.counts.applied, served.follower.counts.loaded) == (9, 0)
        servables = {short_version(version): servable for version, servable in served.exported.items()}
        expected = {
            name: Recommender(servable).rank({**HISTORY, "now_ms": 4}, REQUEST["candidates"])
            for name, servable in servables.items()
        }
        assert len({response.json()["model"] for response in responses}) > 1
        for response in responses:
            assert response.status_code == 200, response.text
            model = response.json()["model"]
            for name, scores in response.json()["scores"].items():
                assert np.allclose(scores, expected[model].scores[name], rtol=1e-4, atol=1e-5), model


def test_served_version_new_items_are_known_at_once(data, tmp_path):
    async def run(served):
        async with served.client() as client:
            while served.run.session.dataset.num_items < 40:
                served.publish()
                assert served.follower.poll()
                model = (await client.get("/v1/models")).json()["models"]["retrieval"]
                assert model["items"] == served.run.session.dataset.num_items
                assert model["version"] == short_version(served.servable.version)
                newest = served.servable.item_keys[-1]
                response = (await client.post("/v1/rank", json={**REQUEST, "candidates": [newest]})).json()
                assert response["unknown_ids"] == []
                assert response["model"] == model["version"]

    with serving(data, tmp_path, "hstu") as served:
        asyncio.run(run(served))
        served.check()


def test_prefix_cache_of_older_version_is_not_used(data, tmp_path):
    async def run(served):
        async with served.client() as client:
            first = [(await client.post("/v1/rank", json=REQUEST)).json() for _ in range(2)]
            assert [response["cache_source"]["from"] for response in first] == ["none", "device"]
            served.publish()
            assert served.follower.poll()
            later = [(await client.post("/v1/rank", json=REQUEST)).json() for _ in range(2)]
            assert [response["cache_source"]["from"] for response in later] == ["none", "device"]
            assert later[0]["model"] != first[0]["model"]

    with serving(data, tmp_path, "ranking") as served:
        asyncio.run(run(served))
        (engine,) = served.service.deployment("ranking").engines
        assert {entry.key.version for entry in engine.tiers.device.entries()} == {served.servable.version}


def test_served_version_change_evicts_old_prefixes(data, tmp_path, monkeypatch):
    """Old prefixes are evicted after the version change, not in it: requests wait for it, and prefixes may be many."""

    async def run(served, engine):
        async with served.client() as client:
            for user in ("ann", "bob"):
                assert (await client.post("/v1/rank", json={**REQUEST, "user": user})).status_code == 200
            served.publish()
            assert served.follower.poll()
            assert num_cached == [2]
            await client.post("/v1/rank", json={**REQUEST, "user": "eve"})
            assert len(engine.tiers.device.entries()) == 1

    with serving(data, tmp_path, "ranking") as served:
        (engine,) = served.service.deployment("ranking").engines
        change = engine._change
        num_cached = []

        def change_and_count(*args):
            change(*args)
            num_cached.append(len(engine.tiers.device.entries()))

        monkeypatch.setattr(engine, "_change", change_and_count)
        asyncio.run(run(served, engine))


def test_served_version_corrupt_delta_waits_for_full_version(data, tmp_path):
    with serving(data, tmp_path, "hstu") as served:
        before = served.servable.version
        bad = served.folder_of(served.publish())
        file = next(bad.glob("delta-rows-items-*"))
        file.write_bytes(file.read_bytes()[:-1] + b"!")
        polls = []
        for _ in range(5):  # the fifth version is a full one
            polls.append(served.follower.poll())
            served.check()
            if not polls[-1]:
                assert served.servable.version == before
                assert served.follower.counts.versions_behind > 0
            served.publish()
        assert polls[0] is False
        assert served.follower.poll()
        served.check()
        assert served.follower.counts.loaded == 1
        assert served.follower.counts.failures == {"corrupt": polls.count(False)}
        text = served.app.metrics.exposition().decode()
        assert f'nestrec_model_poll_failures_total{{model="retrieval",reason="corrupt"}} {polls.count(False)}.0' in text
        assert 'nestrec_model_versions_behind{model="retrieval"} 0.0' in text


@pytest.mark.parametrize("point", ["follow.between_tables", "follow.before_names", "follow.before_apply"])
def test_served_version_failed_delta_is_rolled_back(data, tmp_path, point):
    def fail():
        raise RuntimeError("out of memory")

    with serving(data, tmp_path, "ranking", instances=2) as served:
        before = served.servable.version
        version = served.publish()
        with armed(point, fail):
            assert not served.follower.poll()
        assert served.servable.version == before
        served.check()
        assert served.follower.poll()
        assert served.servable.version == version
        served.check()


@pytest.mark.parametrize("family", ["ranking", "hstu"])
def test_served_version_first_load_waits_for_publication(data, tmp_path, monkeypatch, family):
    applied = []
    apply = StagedVersion.apply
    monkeypatch.setattr(StagedVersion, "apply", lambda staged: (applied.append(staged), apply(staged)))
    with serving(data, tmp_path, family, tables=TablesConfig(store="dram", cache_rows=8)) as served:
        (staged,) = applied  # the warm-up applies the first version to itself
        updated = {id(update.table) for update in staged.updates}
        assert updated >= {id(table) for table in served.servable.tables.values()}
        served.check()  # bitwise unchanged
        assert served.follower.counts.applied == 0
        served.publish()
        assert served.follower.poll()
        served.check()
        other = served.run.export(tmp_path)
    assert "item_ids" not in vars(other)
    Service({served.role: other}, ServiceConfig()).close()
    assert "item_ids" in vars(other), "the id map is built before the first request"


def test_served_version_can_be_pinned_and_released(data, tmp_path):
    async def run(served):
        versions = [served.servable.version, *(served.publish() for _ in range(3))]
        assert served.follower.poll()
        async with served.client() as client:
            for suffix in (f"@{short_version(versions[1])}", ""):
                version = versions[1] if suffix else versions[-1]
                swapped = await client.post("/v1/admin/swap", json={"models": [served.address + suffix]})
                assert swapped.status_code == 200, swapped.text
                assert swapped.json()["models"]["retrieval"]["folder"] == served.address + suffix
                assert served.servable.version == version
                served.check()
                versions.append(served.publish())
                assert served.follower.poll()
                assert served.servable.version == (version if suffix else versions[-1])
                assert served.follower.counts.versions_behind == (3 if suffix else 0)
            response = (await client.post("/v1/admin/rollback", json={})).json()
            assert response["models"]["retrieval"]["version"] == short_version(versions[1])
            rejected = await client.post("/v1/admin/swap", json={"models": [f"{served.address}@abcdef123456"]})
            assert rejected.status_code == 409
            assert served.servable.version == versions[1]

    with serving(data, tmp_path, "hstu") as served:
        asyncio.run(run(served))


def test_cold_start_items_are_added_to_static_models(data, tmp_path):
    """Items cannot be added to a followed model: its next versions bring new items, which would get the same ids."""
    new_items = {"items": [{"id": "new", "features": {}}]}

    async def run(served):
        async with served.client() as client:
            for model, status in ((folder, 200), (served.address, 409), (folder, 200)):
                swapped = await client.post("/v1/admin/swap", json={"models": [model]})
                assert swapped.status_code == 200, swapped.text
                added = await client.post("/v1/items", json=new_items)
                assert added.status_code == status, added.text
                if status != 200:
                    served.publish()
                    assert served.reloader.followers["ranking"].poll()
                    served.check()

    with serving(data, tmp_path, "ranking") as served:
        folder = str(tmp_path / "exported")
        write_servable(served.run.export(tmp_path), Path(folder))
        asyncio.run(run(served))


def test_follow_requires_address_of_versions(data, tmp_path, caplog):
    with serving(data, tmp_path, "ranking") as served:
        write_servable(served.run.export(tmp_path), tmp_path / "exported")
        assert "has no effect" not in caplog.text
        service = Service.load([str(tmp_path / "exported")], ServiceConfig())
        Reloader(service, "cpu", TablesConfig(), FOLLOW).close()
        service.close()
    assert f"no versions are published to {tmp_path / 'exported'}" in caplog.text


@pytest.mark.parametrize("change", ["delta", "items"])
def test_swap_cancels_pending_change_of_old_model(data, tmp_path, monkeypatch, change):
    """A delta or items prepared for the old model are applied to the old model, or not at all."""
    with serving(data, tmp_path, "ranking") as served:
        one, two = str(tmp_path / "one"), str(tmp_path / "two")
        for folder in (one, two):
            write_servable(served.publish() and served.run.export(tmp_path), Path(folder))
        if change == "items":
            served.reloader.swap([one])
        swap = threading.Thread(target=lambda: served.reloader.swap([two]))

        def start_swap(*_):
            swap.start()
            swap.join(0.2)  # the swap waits for the change in progress

        if change == "items":
            monkeypatch.setattr(NewItemInsertion, "has_capacity", property(start_swap))
            add_items(served.service, [NewItem(key="new")])
        else:
            with armed("follow.before_apply", start_swap):
                served.follower.poll()
        swap.join()
        assert served.servable.version == Servable.load(Path(two)).version
        assert served.reloader.current["ranking"].folder == two


def test_rollback_reverts_swap_to_newest_version(data, tmp_path):
    with serving(data, tmp_path, "hstu") as served:
        first = served.servable.version
        second = served.publish()
        served.reloader.swap([served.address])
        assert served.servable.version == second
        served.reloader.rollback()
        assert served.servable.version == first
        served.check()
        served.reloader.rollback()
        assert served.servable.version == second


def test_swap_of_two_addresses_is_atomic(data, tmp_path):
    with serving(data, tmp_path / "a", "hstu") as served, serving(data, tmp_path / "b", "ranking") as other:
        addresses = [served.address, other.address]
        service = Service.load(addresses, ServiceConfig())
        reloader = Reloader(service, "cpu", TablesConfig(), FOLLOW)
        before = reloader.current
        served.publish()
        for wrong in (f"{other.address}@abcdef123456", str(tmp_path), served.address):
            with pytest.raises(UserError):
                reloader.swap([served.address, wrong])
            assert reloader.current == before
        reloader.swap(addresses)
        assert reloader.current["retrieval"].version != before["retrieval"].version
        reloader.close()
        service.close()


def test_follow_address_that_was_republished(data, tmp_path):
    """Version numbers restart at 1. The server must not wait until they exceed the number of the deleted version."""
    with serving(data, tmp_path, "hstu") as served:
        for _ in range(3):
            served.publish()
        assert served.follower.poll()
        shutil.rmtree(served.address)
        fresh = ChangingRun.begin(Topology.single(), data, served.address, family="hstu", store="lru", seed=9)
        fresh.change()
        fresh.publisher.publish(fresh.session, fresh.step)
        fresh.publisher.close()
        assert served.follower.poll()
        assert (served.follower.version_number, served.follower.counts.versions_behind) == (1, 0)
        assert_same(served.servable, fresh.export(tmp_path))


def test_follow_reports_unreachable_address(data, tmp_path):
    """Regression test: an unreachable address used to look like one without a newer version."""
    with serving(data, tmp_path, "hstu") as served:
        moved = Path(served.address).rename(tmp_path / "moved")
        assert not served.follower.poll()
        assert served.follower.counts.failures == {"unavailable": 1}
        assert "contains no versions any more" in served.follower.counts.problem
        served.check()
        moved.rename(served.address)
        assert served.follower.poll()
        assert not served.follower.counts.problem


def test_freshness_is_reported_with_parts(data, tmp_path):
    async def run(served):
        async with served.client() as client:
            now_s = time.time()
            served.publish(Times(first_event_s=now_s - 30, mean_event_s=now_s - 20, closed_s=now_s - 5))
            assert served.follower.poll()
            follow = (await client.get("/v1/status")).json()["follow"]["retrieval"]
            assert follow["freshness_s"] is None, "freshness is measured at the first response"
            await client.post("/v1/rank", json=REQUEST)
            follow = (await client.get("/v1/status")).json()["follow"]["retrieval"]
            parts = follow["parts_s"]
            assert list(parts) == ["window", "training", "publish", "fetch", "apply", "response"]
            assert parts["window"] == pytest.approx(15.0)
            assert 5.0 <= parts["training"] <= time.time() - (now_s - 5)
            assert all(parts[name] >= 0 for name in ("publish", "fetch", "apply", "response"))
            assert follow["freshness_s"] == pytest.approx(sum(parts.values()))
            await client.post("/v1/rank", json=REQUEST)
            text = (await client.get("/metrics")).text
            assert 'nestrec_model_freshness_seconds_count{model="retrieval"} 1.0' in text
            assert 'nestrec_model_freshness_seconds_bucket{le="5.0",model="retrieval"} 0.0' in text
            last_bucket = 'nestrec_model_freshness_seconds_bucket{le="86400.0",model="retrieval"} 1.0'
            assert last_bucket in text, "buckets must cover stream windows, which are longer than request times"
            assert 'nestrec_model_freshness_part_seconds{model="retrieval",part="window"} 15.' in text

    with serving(data, tmp_path, "hstu") as served:
        asyncio.run(run(served))


def test_fleet_coordinated_follow_can_be_pinned(data, tmp_path):
    """Swapping to a version or to an exported model pins it; swapping to an address without a version resumes."""

    async def use(client, gateway, _):
        loop = asyncio.get_running_loop()
        rollout = gateway.rollout

        def move(models):
            return asyncio.run_coroutine_threadsafe(rollout.follow(models), loop).result().status == 200

        follower = FleetVersionFollower([served.address], 1.0, move, rollout.models_to_follow)

        async def served_version():
            instances = (await client.get("/v1/admin/fleet")).json()["instances"]
            (version,) = {instance["models"]["retrieval"]["version"] for instance in instances}
            return version

        async def change_models(command, *models):
            response = await client.post(f"/v1/admin/{command}", json={"models": list(models)} if models else {})
            assert response.status_code == 200, response.text
            return await served_version()

        async def publish_and_poll():
            version = short_version(served.publish())
            assert await asyncio.to_thread(follower.poll)
            return version

        first = await publish_and_poll()
        assert await served_version() == first
        second = await publish_and_poll()
        assert await change_models("swap", f"{served.address}@{first}") == first
        third = await publish_and_poll()
        assert await served_version() == first, "a version named in a swap is pinned"
        assert await change_models("swap", served.address) == third
        assert await publish_and_poll() == await served_version(), "following resumes"
        await change_models("swap", folder)
        last = await publish_and_poll()
        assert await served_version() not in (second, third, last), "an exported model is not replaced"
        assert await change_models("swap", served.address) == last
        newest = short_version(served.publish())
        assert await change_models("swap", served.address) == newest
        assert await change_models("rollback") == last
        assert not rollout.models_to_follow([served.address]), "the target of a rollback is pinned"

    with serving(data, tmp_path, "hstu") as served:
        folder = str(tmp_path / "exported")
        write_servable(served.run.export(tmp_path), Path(folder))
        behind_gateway(served.address, use, count=2)


def test_fleet_coordinated_follow_applies_deltas(data, tmp_path):
    with serving(data, tmp_path, "hstu") as served:
        other = Service.load([served.address], ServiceConfig())
        reloaders = [
            served.reloader,
            Reloader(other, "cpu", TablesConfig(), VersionFollowConfig(enabled=True, mode="coordinated")),
        ]

        def swap(models):
            for reloader in reloaders:
                reloader.swap(models)
            return True

        follower = FleetVersionFollower([served.address], 1.0, swap)
        for number in range(4):
            version = served.publish()
            assert follower.poll()
            assert [r.current["retrieval"].version for r in reloaders] == [version, version]
            assert [r.followers["retrieval"].counts.applied for r in reloaders] == [number + 1, number + 1]
            served.check()
        reloaders[1].close()
        other.close()


def test_follower_logs_each_version(data, tmp_path, caplog):
    caplog.set_level("INFO", logger="nestrec")
    with serving(data, tmp_path, "hstu") as served:
        served.publish()
        assert served.follower.poll()
        name = served.run.publisher.newest.folder
        assert f"retrieval model: now serving version {name} of step " in caplog.text


def swap_result(served, model):
    """Swap to a model; return the HTTP status, and the message and remedy of the error."""

    async def swap():
        async with served.client() as client:
            return await client.post("/v1/admin/swap", json={"models": [model]})

    response = asyncio.run(swap())
    error = response.json().get("error", {})
    return response.status_code, f"{error.get('message', '')} {error.get('remedy', '')}".strip()


@pytest.mark.parametrize("damage", ["cut", "changed", "missing"])
def test_swap_names_the_damaged_file(data, tmp_path, damage):
    with serving(data, tmp_path, "hstu") as served:
        before = served.servable.version
        folder = served.folder_of(served.publish())
        newest = Path(served.address, "newest.json")
        for file in [newest, *sorted(folder.iterdir())]:
            content = file.read_bytes()
            match damage:
                case "cut":
                    file.write_bytes(content[: len(content) // 2])
                case "changed":
                    file.write_bytes(content[:-3] + b"???")
                case _:
                    file.unlink()
            status, message = swap_result(served, served.address)
            assert status == 409, (file, message)
            assert file.name in message
            assert "None" not in message
            assert served.servable.version == before
            file.write_bytes(content)
        assert swap_result(served, served.address) == (200, "")


def test_swap_and_poll_time_out_if_storage_hangs(data, tmp_path):
    """A named pipe without a writer simulates a mount that hangs."""
    with serving(data, tmp_path, "hstu", read_timeout_s=0.1) as served:
        before = served.servable.version
        file = next(served.folder_of(served.publish()).glob("delta-rows-*"))
        content = file.read_bytes()
        file.unlink()
        os.mkfifo(file)
        for _ in range(3):
            assert not served.follower.poll()
        assert served.follower.counts.failures == {"unavailable": 3}
        status, message = swap_result(served, served.address)
        assert (status, file.name in message) == (409, True)
        assert served.servable.version == before
        readers = [thread for thread in threading.enumerate() if thread.name == "nestrec-read"]
        assert len(readers) == 1, "all attempts wait for the same read"
        file.write_bytes(content)  # the read ends
        readers[0].join()
        file.unlink()
        file.write_bytes(content)
        assert served.follower.poll()


def test_server_stops_while_storage_hangs(data, tmp_path):
    with serving(data, tmp_path, "hstu") as served:
        options = ("--follow", "--follow.poll_interval_s", "0.05", "--follow.read_timeout_s", "0.1")
        with running_server(served.address, *options) as (_, process):
            os.mkfifo(tmp_path / "fifo")
            os.replace(tmp_path / "fifo", Path(served.address, "newest.json"))
            while b"the storage is not responding" not in process.stdout.readline():
                assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(20.0) == 0


def test_version_is_found_by_number_or_unique_prefix(data, tmp_path):
    with serving(data, tmp_path, "hstu") as served:
        steps = [served.run.publisher.newest]
        for _ in range(2):
            served.publish()
            steps.append(served.run.publisher.newest)
        assert served.follower.poll()
        for step in steps:
            number, token = step.folder.split("-")
            digest = step.manifest.version
            prefixes = [text for text in (token, token[:6], digest[:12]) if not text.isdigit()]
            for prefix in (step.folder, number, number.lstrip("0"), f"{number}-", step.folder[:12], digest, *prefixes):
                model = f"{served.address}@{prefix}"
                assert swap_result(served, model) == (200, ""), prefix
                loaded = served.reloader.current["retrieval"]
                assert short_version(loaded.version) == step.folder
                assert loaded.folder == f"{served.address}@{step.folder}"
        names = [step.folder for step in steps]
        problems = {
            "4": "no version matches",
            "0000": "no version matches",
            "00000000": "no version matches",
            "0000000a": "no version matches",
            "xyz": "no version matches",
        }
        for prefix, problem in problems.items():
            status, message = swap_result(served, f"{served.address}@{prefix}")
            assert (status, problem in message) == (409, True)
            assert all(name in message for name in names)
            with pytest.raises(UserError, match=problem) as caught:
                open_model(ModelAddress(served.address, prefix))
            assert all(name in str(caught.value) for name in names)


def test_version_number_is_not_a_digest_prefix(tmp_path, monkeypatch):
    digests = {
        "00000001-4a00aaaa": "4" * 64,
        "00000002-9f2c41d0": "12345678" * 8,
        "00000003-9f2cbbbb": "abc" + "0" * 61,
    }
    versions = VersionStore(ModelAddress(str(tmp_path)).storage)
    monkeypatch.setattr(VersionStore, "published", lambda _: iter(digests.items()))
    for folder in digests:
        (tmp_path / "versions" / folder).mkdir(parents=True)
    accepted = {"2": 2, "00000003": 3, "4a00": 1, "9f2c4": 2, "123456781": 2, "abc0": 3, "00000003-9": 3}
    for name, number in accepted.items():
        folder, digest = versions.find(name)
        assert (folder, digest) == (list(digests)[number - 1], digests[folder]), name
    for name in ("4", "4444", "12345678", "abc", "4a0"):
        with pytest.raises(UserError, match=f"version={name}: no version matches. Choose one of 00000003-9f2cbbbb, 0"):
            versions.find(name)
    with pytest.raises(
        UserError, match=r"several versions match. Choose one of 00000003-9f2cbbbb, 00000002-9f2c41d0\."
    ):
        versions.find("9f2c")


def test_older_version_is_found_if_newest_is_damaged(data, tmp_path):
    with serving(data, tmp_path, "hstu") as served:
        good = served.servable.version
        served.publish()
        assert served.follower.poll()
        folder = served.folder_of(served.publish())
        (folder / "delta.json").write_bytes(b"{")
        assert swap_result(served, f"{served.address}@{short_version(good)}") == (200, "")
        assert served.servable.version == good
        status, message = swap_result(served, f"{served.address}@{folder.name}")
        assert (status, "delta.json" in message) == (409, True)
