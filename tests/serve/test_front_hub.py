"""What the process that computes makes of what fronts tell it, without processes."""

import asyncio
from dataclasses import replace

import numpy as np
import orjson
import pytest

from nestrec.serving.core.request_limits import LimitsConfig, RequestSource
from nestrec.serving.frontend.frontend_app import FrontendApp, WorkerCounters
from nestrec.serving.frontend.frontend_hub import FrontendHub, _Ended
from nestrec.serving.frontend.remote_service import RemoteScoringService
from nestrec.serving.frontend.wire_format import OK, SWAPPED, Channel, FrameKind
from nestrec.serving.frontend.worker_pool import FrontendWorker
from nestrec.serving.history_store.history_store import HistoryStoreConfig
from nestrec.serving.history_store.memory_store import MemoryHistoryStore
from nestrec.serving.http.http_app import App
from nestrec.serving.http.routes import all_endpoints
from nestrec.serving.model.request_inputs import Candidates, History
from nestrec.serving.service.inference_service import ServiceConfig

HEAD = {"raw_path": "/v1/rank", "query": "", "client": "c", "id": "one", "trace": ""}


class BusyStore(MemoryHistoryStore):
    """Does not answer."""

    def __init__(self):
        super().__init__(HistoryStoreConfig())
        self.was_asked = asyncio.Event()

    async def get(self, user, timeout_s):
        self.was_asked.set()
        await asyncio.Event().wait()


def hub_of(app):
    """(hub, a front of it)"""
    hub = FrontendHub(app, None, list, count=1, config=b"", drain_s=1.0, refusals={})
    front = FrontendWorker(0, hub.names())
    front.channel = Channel(lambda *_: None, lambda: None)
    return hub, front


def test_what_a_front_tells_late_is_counted_all_the_same(service):
    app = App(service, LimitsConfig(default_timeout_ms=10_000))
    hub, front = hub_of(app)
    told = {
        "answers": [["/v1/rank", 200, [0.1, 0.2]]],
        "refusals": {},
        "unread": {"gone": 1},
        "failures": {"a front": 2},
    }
    hub.received(front, FrameKind.TELL, 7, orjson.dumps(told))  # nobody waits for it any more
    assert b'nestrec_requests_total{route="/v1/rank",status="200"} 2.0' in app.metrics.exposition()
    assert b'nestrec_background_failures_total{task="a front"} 2.0' in app.metrics.exposition()


def test_a_forwarded_request_whose_client_goes_away_is_counted_by_the_front_alone(service):
    async def run():
        store = BusyStore()
        app = App(service, LimitsConfig(default_timeout_ms=10_000), store)
        hub, front = hub_of(app)
        about = orjson.dumps({"method": "POST", "path": "/v1/rank", **HEAD})
        body = orjson.dumps({"user": "u", "candidates": ["1"]})
        hub.received(front, FrameKind.FORWARD, 1, len(about).to_bytes(4, "little") + about + body)
        await store.was_asked.wait()
        hub.received(front, FrameKind.CANCEL, 1, b"")
        while front.forwarded:
            await asyncio.sleep(0)
        return app.metrics.exposition()

    assert b"nestrec_requests_total{route" not in asyncio.run(run())


def test_a_front_is_told_of_each_request_that_comes():
    """It keeps its core awake by that."""
    called, replies = [], []

    async def run():
        remote = RemoteScoringService(ServiceConfig(), dict, lambda: None)
        app = FrontendApp(
            remote, LimitsConfig(), all_endpoints(), WorkerCounters(), connect=None, called=lambda: called.append(True)
        )
        for body in (b"{", b"[]"):
            await app.serve("/v1/rank", "c", body, replies.append)

    asyncio.run(run())
    assert [reply.status for reply in replies] == [400, 400]
    assert len(called) == 2


@pytest.mark.parametrize("has_grown", [False, True])
def test_an_answer_by_a_later_version_that_knows_more_items_sends_its_front_back_to_read_the_request_again(
    service, has_grown
):
    """An item that it took for unknown may be one of those."""
    now = service.fleet("retrieval")
    sender = RequestSource("c")
    keys = now.servable.item_keys[:-1] if has_grown else now.servable.item_keys
    before = replace(now, servable=replace(now.servable, version="before", item_keys=keys))
    hub, front = hub_of(App(service, LimitsConfig(default_timeout_ms=10_000)))
    history = History(items=np.array([1]), times_ms=np.array([1]), actions=np.array([0]))
    asked = Candidates(items=np.array([2, 0]), now_ms=2)
    slot, work = service.begin_rank(now, "u", history, asked, timeout_s=10.0, sender=sender)
    work.future.result(10.0)
    service.end_rank(slot)

    async def outcome():
        hub._loop = asyncio.get_running_loop()
        return hub._outcome(_Ended(front, 1, slot, before, sender, work))

    replied = asyncio.run(outcome())
    assert replied.outcome == (SWAPPED if has_grown else OK)
    assert (replied.answer is None) == has_grown
