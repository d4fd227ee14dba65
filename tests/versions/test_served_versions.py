"""Servers that follow: every answer is that of one version, the one that it names, whatever happens to deltas."""

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
from front_processes import wait_for
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
from nestrec.serving.model.servable_spec import shown_version
from nestrec.serving.model.served_tables import TablesConfig
from nestrec.serving.service.cold_start_items import NewItem, NewItemInsertion, add_items
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec.serving.service.model_reloader import Reloader
from nestrec.serving.service.version_follower import VersionFollowConfig
from nestrec.serving.versions.live_version import ModelAddress, StagedVersion, open_source
from nestrec.serving.versions.version_manifest import Times
from support.fail_points import armed
from support.tiny_runs import make_datasets

LIMITS = LimitsConfig(default_timeout_ms=10_000, tells_prefix=True)
FOLLOW = VersionFollowConfig(on=True, moves="told")
HISTORY = {"items": ["1", "2", "3"], "times_ms": [1, 2, 3], "actions": [1, 0, 1]}
ASKED = {"user": "ann", "history": HISTORY, "candidates": ["4", "5", "6", "29"], "now_ms": 4}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make_datasets(folder, num_topics=5)
    return folder


@pytest.mark.parametrize(
    ("family", "instances", "tables"),
    [("hstu", 1, None), ("ranking", 2, None), ("ranking", 1, TablesConfig(store="dram", cache_rows=8))],
)
def test_every_answer_is_that_of_the_version_it_names(data, tmp_path, family, instances, tables):
    with serving(data, tmp_path, family, instances, tables) as served:
        answers = []
        is_over = threading.Event()

        async def ask_on():
            async with served.client() as client:
                users = [f"user {number}" for number in range(6)]
                is_last = False
                while not is_last or len(answers) < 30:
                    is_last = is_over.is_set()  # so that some ask when all is done
                    asked = [client.post("/v1/rank", json={**ASKED, "user": user}) for user in users]
                    answers.extend(await asyncio.gather(*asked))

        asking = threading.Thread(target=lambda: asyncio.run(ask_on()))
        asking.start()
        wait_for(lambda: answers)
        for _ in range(9):
            served.publish()
            assert served.follower.look(), served.follower.counts.problem
            served.check()
        is_over.set()
        asking.join()
        assert (served.follower.counts.applied, served.follower.counts.loaded) == (9, 0)
        named = {shown_version(version): servable for version, servable in served.exported.items()}
        expected = {
            name: Recommender(servable).rank({**HISTORY, "now_ms": 4}, ASKED["candidates"])
            for name, servable in named.items()
        }
        assert len({answer.json()["model"] for answer in answers}) > 1
        for answer in answers:
            assert answer.status_code == 200, answer.text
            told = answer.json()
            for name, scores in told["scores"].items():
                assert np.allclose(scores, expected[told["model"]].scores[name], rtol=1e-4, atol=1e-5), told["model"]


def test_new_items_are_known_as_soon_as_the_version_is_named(data, tmp_path):
    async def run(served):
        async with served.client() as client:
            while served.run.session.dataset.num_items < 40:
                served.publish()
                assert served.follower.look()
                told = (await client.get("/v1/models")).json()["models"]["retrieval"]
                assert told["items"] == served.run.session.dataset.num_items
                assert told["version"] == shown_version(served.servable.version)
                newest = served.servable.item_keys[-1]
                answer = (await client.post("/v1/rank", json={**ASKED, "candidates": [newest]})).json()
                assert answer["unknown"] == []
                assert answer["model"] == told["version"]

    with serving(data, tmp_path, "hstu") as served:
        asyncio.run(run(served))
        served.check()


def test_prefixes_of_older_versions_are_not_used(data, tmp_path):
    async def run(served):
        async with served.client() as client:
            first = [(await client.post("/v1/rank", json=ASKED)).json() for _ in range(2)]
            assert [answer["prefix"]["from"] for answer in first] == ["none", "device"]
            served.publish()
            assert served.follower.look()
            later = [(await client.post("/v1/rank", json=ASKED)).json() for _ in range(2)]
            assert [answer["prefix"]["from"] for answer in later] == ["none", "device"]
            assert later[0]["model"] != first[0]["model"]

    with serving(data, tmp_path, "ranking") as served:
        asyncio.run(run(served))
        (engine,) = served.service.fleet("ranking").engines
        assert {entry.key.version for entry in engine.tiers.device.entries()} == {served.servable.version}


def test_prefixes_of_older_versions_leave_when_the_change_is_over(data, tmp_path, monkeypatch):
    """Requests wait for a change, and there may be many prefixes."""

    async def run(served, engine):
        async with served.client() as client:
            for user in ("ann", "bob"):
                assert (await client.post("/v1/rank", json={**ASKED, "user": user})).status_code == 200
            served.publish()
            assert served.follower.look()
            assert kept == [2]
            await client.post("/v1/rank", json={**ASKED, "user": "eve"})
            assert len(engine.tiers.device.entries()) == 1

    with serving(data, tmp_path, "ranking") as served:
        (engine,) = served.service.fleet("ranking").engines
        change = engine._change
        kept = []

        def watched(*given):
            change(*given)
            kept.append(len(engine.tiers.device.entries()))

        monkeypatch.setattr(engine, "_change", watched)
        asyncio.run(run(served, engine))


def test_damage_keeps_the_version_in_service_until_a_full_one_heals_it(data, tmp_path):
    with serving(data, tmp_path, "hstu") as served:
        before = served.servable.version
        bad = served.folder_of(served.publish())
        file = next(bad.glob("delta-rows-items-*"))
        file.write_bytes(file.read_bytes()[:-1] + b"!")
        looks = []
        for _ in range(5):  # the fifth version is told in full
            looks.append(served.follower.look())
            served.check()
            if not looks[-1]:
                assert served.servable.version == before
                assert served.follower.counts.behind > 0
            served.publish()
        assert looks[0] is False
        assert served.follower.look()
        served.check()
        assert served.follower.counts.loaded == 1
        assert served.follower.counts.failures == {"damaged": looks.count(False)}
        text = served.app.metrics.exposition().decode()
        assert f'nestrec_follow_failures_total{{model="retrieval",reason="damaged"}} {looks.count(False)}.0' in text
        assert 'nestrec_versions_behind{model="retrieval"} 0.0' in text


@pytest.mark.parametrize("point", ["follow.between_tables", "follow.before_names", "follow.before_apply"])
def test_a_delta_that_fails_half_way_leaves_no_trace(data, tmp_path, point):
    def fail():
        raise RuntimeError("out of memory")

    with serving(data, tmp_path, "ranking", instances=2) as served:
        before = served.servable.version
        version = served.publish()
        with armed(point, fail):
            assert not served.follower.look()
        assert served.servable.version == before
        served.check()
        assert served.follower.look()
        assert served.servable.version == version
        served.check()


@pytest.mark.parametrize("family", ["ranking", "hstu"])
def test_what_a_first_version_needs_is_there_before_it_comes(data, tmp_path, monkeypatch, family):
    rehearsed = []
    apply = StagedVersion.apply
    monkeypatch.setattr(StagedVersion, "apply", lambda staged: (rehearsed.append(staged), apply(staged)))
    with serving(data, tmp_path, family, tables=TablesConfig(store="dram", cache_rows=8)) as served:
        (staged,) = rehearsed
        assert {id(put.table) for put in staged.puts} >= {id(table) for table in served.servable.tables.values()}
        served.check()  # every bit is as it was
        assert served.follower.counts.applied == 0
        served.publish()
        assert served.follower.look()
        served.check()
        other = served.run.export(tmp_path)
    assert "item_ids" not in vars(other)
    Service({served.role: other}, ServiceConfig()).close()
    assert "item_ids" in vars(other), "the first request does not wait for names"


def test_a_server_can_be_pinned_to_a_version_and_go_on_from_it(data, tmp_path):
    async def run(served):
        versions = [served.servable.version, *(served.publish() for _ in range(3))]
        assert served.follower.look()
        async with served.client() as client:
            for text in (f"@{shown_version(versions[1])}", ""):
                version = versions[1] if text else versions[-1]
                told = await client.post("/v1/admin/swap", json={"models": [served.address + text]})
                assert told.status_code == 200, told.text
                assert told.json()["models"]["retrieval"]["folder"] == served.address + text
                assert served.servable.version == version
                served.check()
                versions.append(served.publish())
                assert served.follower.look()
                assert served.servable.version == (version if text else versions[-1])
            back = (await client.post("/v1/admin/rollback", json={})).json()
            assert back["models"]["retrieval"]["version"] == shown_version(versions[1])
            refused = await client.post("/v1/admin/swap", json={"models": [f"{served.address}@abcdef123456"]})
            assert refused.status_code == 409
            assert served.servable.version == versions[1]

    with serving(data, tmp_path, "hstu") as served:
        asyncio.run(run(served))


def test_items_are_told_to_models_that_do_not_follow_whatever_the_server_was_started_with(data, tmp_path):
    """Those of a run come with its versions: items that were told meanwhile would have their numbers."""
    told = {"items": [{"id": "told", "features": {}}]}

    async def run(served):
        async with served.client() as client:
            for model, status in ((folder, 200), (served.address, 409), (folder, 200)):
                swapped = await client.post("/v1/admin/swap", json={"models": [model]})
                assert swapped.status_code == 200, swapped.text
                added = await client.post("/v1/items", json=told)
                assert added.status_code == status, added.text
                if status != 200:
                    served.publish()
                    assert served.reloader.followers["ranking"].look()
                    served.check()

    with serving(data, tmp_path, "ranking") as served:
        folder = str(tmp_path / "exported")
        write_servable(served.run.export(tmp_path), Path(folder))
        asyncio.run(run(served))


def test_a_server_that_is_to_follow_and_has_nothing_to_follow_says_so(data, tmp_path, caplog):
    with serving(data, tmp_path, "ranking") as served:
        write_servable(served.run.export(tmp_path), tmp_path / "exported")
        assert "nothing is followed" not in caplog.text
        service = Service.load([str(tmp_path / "exported")], ServiceConfig())
        Reloader(service, "cpu", TablesConfig(), FOLLOW).close()
        service.close()
    assert f"no versions are published to {tmp_path / 'exported'}" in caplog.text


@pytest.mark.parametrize("meanwhile", ["a delta", "items"])
def test_a_swap_is_not_undone_by_what_was_on_its_way_to_the_model_before(data, tmp_path, monkeypatch, meanwhile):
    """Staged or grown beside the old model, it is written into that, or nowhere."""
    with serving(data, tmp_path, "ranking") as served:
        one, two = str(tmp_path / "one"), str(tmp_path / "two")
        for folder in (one, two):
            write_servable(served.publish() and served.run.export(tmp_path), Path(folder))
        if meanwhile == "items":
            served.reloader.swap([one])
        swap = threading.Thread(target=lambda: served.reloader.swap([two]))

        def swapped(*_):
            swap.start()
            swap.join(0.2)  # it waits for who is here

        if meanwhile == "items":
            monkeypatch.setattr(NewItemInsertion, "has_room", property(swapped))
            add_items(served.service, [NewItem(key="told")])
        else:
            with armed("follow.before_apply", swapped):
                served.follower.look()
        swap.join()
        assert served.servable.version == Servable.load(Path(two)).version
        assert served.reloader.current["ranking"].folder == two


def test_a_rollback_undoes_a_swap_to_the_newest_version(data, tmp_path):
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


def test_models_of_two_addresses_are_swapped_together_or_not_at_all(data, tmp_path):
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


def test_an_address_that_was_emptied_and_published_anew_is_followed(data, tmp_path):
    """Its numbers begin anew: the server would stay at a model that is gone until they have come as far."""
    with serving(data, tmp_path, "hstu") as served:
        for _ in range(3):
            served.publish()
        assert served.follower.look()
        shutil.rmtree(served.address)
        fresh = ChangingRun.begin(Topology.single(), data, served.address, family="hstu", store="lru", seed=9)
        fresh.change()
        fresh.publisher.publish(fresh.session, fresh.step)
        fresh.publisher.close()
        assert served.follower.look()
        assert (served.follower.number, served.follower.counts.behind) == (1, 0)
        assert_same(served.servable, fresh.export(tmp_path))


def test_an_address_that_is_gone_is_a_failure_until_it_is_back(data, tmp_path):
    """It looked as if nothing newer was published, for ever."""
    with serving(data, tmp_path, "hstu") as served:
        away = Path(served.address).rename(tmp_path / "elsewhere")
        assert not served.follower.look()
        assert served.follower.counts.failures == {"away": 1}
        assert "names no version any more" in served.follower.counts.problem
        served.check()
        away.rename(served.address)
        assert served.follower.look()
        assert not served.follower.counts.problem


def test_how_fresh_answers_are_is_told_with_its_parts(data, tmp_path):
    async def run(served):
        async with served.client() as client:
            now_s = time.time()
            served.publish(Times(first_event_s=now_s - 30, mean_event_s=now_s - 20, closed_s=now_s - 5))
            assert served.follower.look()
            follow = (await client.get("/v1/status")).json()["follow"]["retrieval"]
            assert follow["fresh_s"] is None, "nobody has asked yet"
            await client.post("/v1/rank", json=ASKED)
            follow = (await client.get("/v1/status")).json()["follow"]["retrieval"]
            parts = follow["parts_s"]
            assert list(parts) == ["window", "training", "publish", "fetch", "apply", "answer"]
            assert parts["window"] == pytest.approx(15.0)
            assert 5.0 <= parts["training"] <= time.time() - (now_s - 5)
            assert all(parts[name] >= 0 for name in ("publish", "fetch", "apply", "answer"))
            assert follow["fresh_s"] == pytest.approx(sum(parts.values()))
            await client.post("/v1/rank", json=ASKED)
            text = (await client.get("/metrics")).text
            assert 'nestrec_freshness_seconds_count{model="retrieval"} 1.0' in text
            assert 'nestrec_freshness_seconds_bucket{le="5.0",model="retrieval"} 0.0' in text
            longest = 'nestrec_freshness_seconds_bucket{le="86400.0",model="retrieval"} 1.0'
            assert longest in text, "windows are longer than what a user waits for"
            assert 'nestrec_freshness_part_seconds{model="retrieval",part="window"} 15.' in text

    with serving(data, tmp_path, "hstu") as served:
        asyncio.run(run(served))


def test_a_fleet_that_moves_together_stays_where_it_is_told_to(data, tmp_path):
    """At a version that is named, at a model that does not follow; and goes on from an address that is named."""

    async def use(client, gateway, _):
        loop = asyncio.get_running_loop()
        rollout = gateway.rollout

        def move(models):
            return asyncio.run_coroutine_threadsafe(rollout.follow(models), loop).result().status == 200

        front = FleetVersionFollower([served.address], 1.0, move, rollout.followed)

        async def told(path, *models):
            answer = await client.post(f"/v1/admin/{path}", json={"models": list(models)} if models else {})
            assert answer.status_code == 200, answer.text
            return await serve()

        async def serve():
            models = (await client.get("/v1/admin/fleet")).json()["instances"]
            (version,) = {one["models"]["retrieval"]["version"] for one in models}
            return version

        async def published():
            version = shown_version(served.publish())
            assert await asyncio.to_thread(front.look)
            return version

        first = await published()
        assert await serve() == first
        second = await published()
        assert await told("swap", f"{served.address}@{first}") == first
        third = await published()
        assert await serve() == first, "it is pinned"
        assert await told("swap", served.address) == third
        assert await published() == await serve(), "and goes on"
        await told("swap", folder)
        last = await published()
        assert await serve() not in (second, third, last), "another model is not replaced"
        assert await told("swap", served.address) == last
        newest = shown_version(served.publish())
        assert await told("swap", served.address) == newest
        assert await told("rollback") == last
        assert not rollout.followed([served.address]), "nor is what was gone back to"

    with serving(data, tmp_path, "hstu") as served:
        folder = str(tmp_path / "exported")
        write_servable(served.run.export(tmp_path), Path(folder))
        behind_gateway(served.address, use, count=2)


def test_a_fleet_moves_together_by_deltas(data, tmp_path):
    with serving(data, tmp_path, "hstu") as served:
        other = Service.load([served.address], ServiceConfig())
        reloaders = [
            served.reloader,
            Reloader(other, "cpu", TablesConfig(), VersionFollowConfig(on=True, moves="together")),
        ]

        def swap(models):
            for reloader in reloaders:
                reloader.swap(models)
            return True

        front = FleetVersionFollower([served.address], 1.0, swap)
        for number in range(4):
            version = served.publish()
            assert front.look()
            assert [r.current["retrieval"].version for r in reloaders] == [version, version]
            assert [r.followers["retrieval"].counts.applied for r in reloaders] == [number + 1, number + 1]
            served.check()
        reloaders[1].close()
        other.close()


def test_follower_logs_each_version(data, tmp_path, caplog):
    caplog.set_level("INFO", logger="nestrec")
    with serving(data, tmp_path, "hstu") as served:
        served.publish()
        assert served.follower.look()
        name = served.run.publisher.newest.folder
        assert f"the retrieval model serves version {name} of step " in caplog.text


def asked_to_swap(served, model):
    """Returns the status of a swap, and the message and remedy of its error."""

    async def swap():
        async with served.client() as client:
            return await client.post("/v1/admin/swap", json={"models": [model]})

    answer = asyncio.run(swap())
    error = answer.json().get("error", {})
    return answer.status_code, f"{error.get('message', '')} {error.get('remedy', '')}".strip()


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
            status, message = asked_to_swap(served, served.address)
            assert status == 409, (file, message)
            assert file.name in message
            assert "None" not in message
            assert served.servable.version == before
            file.write_bytes(content)
        assert asked_to_swap(served, served.address) == (200, "")


def test_swap_and_look_end_if_storage_never_answers(data, tmp_path):
    """A pipe that nothing is written to stands for a mount that hangs."""
    with serving(data, tmp_path, "hstu", read_timeout_s=0.1) as served:
        before = served.servable.version
        file = next(served.folder_of(served.publish()).glob("delta-rows-*"))
        content = file.read_bytes()
        file.unlink()
        os.mkfifo(file)
        for _ in range(3):
            assert not served.follower.look()
        assert served.follower.counts.failures == {"away": 3}
        status, message = asked_to_swap(served, served.address)
        assert (status, file.name in message) == (409, True)
        assert served.servable.version == before
        readers = [thread for thread in threading.enumerate() if thread.name == "nestrec-read"]
        assert len(readers) == 1, "all of them wait for one read"
        file.write_bytes(content)  # the read ends
        readers[0].join()
        file.unlink()
        file.write_bytes(content)
        assert served.follower.look()


def test_server_stops_while_storage_does_not_answer(data, tmp_path):
    with serving(data, tmp_path, "hstu") as served:
        options = ("--follow", "--follow.poll_s", "0.05", "--follow.read_timeout_s", "0.1")
        with running_server(served.address, *options) as (_, process):
            os.mkfifo(tmp_path / "fifo")
            os.replace(tmp_path / "fifo", Path(served.address, "newest.json"))
            while b"the storage does not answer" not in process.stdout.readline():
                assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(20.0) == 0


def test_version_has_one_name_and_is_found_by_any_unique_prefix(data, tmp_path):
    with serving(data, tmp_path, "hstu") as served:
        steps = [served.run.publisher.newest]
        for _ in range(2):
            served.publish()
            steps.append(served.run.publisher.newest)
        assert served.follower.look()
        for step in steps:
            number, token = step.folder.split("-")
            digest = step.manifest.version
            for prefix in (step.folder, number, f"{number}-", step.folder[:12], token, token[:6], digest[:12], digest):
                model = f"{served.address}@{prefix}"
                assert asked_to_swap(served, model) == (200, ""), prefix
                loaded = served.reloader.current["retrieval"]
                assert shown_version(loaded.version) == step.folder
                assert loaded.folder == f"{served.address}@{step.folder}"
        names = [step.folder for step in steps]
        for prefix, problem in (("0000", "names more than one version"), ("0000000a", "is not there")):
            status, message = asked_to_swap(served, f"{served.address}@{prefix}")
            assert (status, problem in message) == (409, True)
            assert all(name in message for name in names)
            with pytest.raises(UserError, match=problem) as caught:
                open_source(ModelAddress(served.address, prefix))
            assert all(name in str(caught.value) for name in names)


def test_older_version_is_found_though_the_newest_is_damaged(data, tmp_path):
    with serving(data, tmp_path, "hstu") as served:
        good = served.servable.version
        served.publish()
        assert served.follower.look()
        folder = served.folder_of(served.publish())
        (folder / "delta.json").write_bytes(b"{")
        assert asked_to_swap(served, f"{served.address}@{shown_version(good)}") == (200, "")
        assert served.servable.version == good
        status, message = asked_to_swap(served, f"{served.address}@{folder.name}")
        assert (status, "delta.json" in message) == (409, True)
