"""Frames of frontend workers in the engine process, without starting processes."""

import asyncio
from dataclasses import replace

import numpy as np
import orjson
import pytest

from nestrec.serving.core.request_limits import LimitsConfig, RequestSource
from nestrec.serving.frontend.frontend_app import FrontendApp, WorkerCounters
from nestrec.serving.frontend.frontend_hub import FrontendHub, _RankCompletion
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


class HangingStore(MemoryHistoryStore):
    """History store whose reads never complete."""

    def __init__(self):
        super().__init__(HistoryStoreConfig())
        self.has_read = asyncio.Event()

    async def get(self, user, timeout_s):
        self.has_read.set()
        await asyncio.Event().wait()


def make_hub(app):
    """Return a hub and one of its frontend workers."""
    hub = FrontendHub(app, None, list, count=1, config=b"", drain_s=1.0, auth_failures={})
    worker = FrontendWorker(0, hub.new_name_sender())
    worker.channel = Channel(lambda *_: None, lambda: None)
    return hub, worker


def test_frontend_hub_counts_late_reports(service):
    app = App(service, LimitsConfig(default_timeout_ms=10_000))
    hub, worker = make_hub(app)
    counters = {
        "responses": [["/v1/rank", 200, [0.1, 0.2]]],
        "auth_failures": {},
        "unread_rejections": {"gone": 1},
        "failures": {"a worker": 2},
    }
    hub.on_frame(worker, FrameKind.COUNTERS, 7, orjson.dumps(counters))  # no metrics request waits for this report
    assert b'nestrec_http_requests_total{route="/v1/rank",status="200"} 2.0' in app.metrics.exposition()
    assert b'nestrec_background_failures_total{task="a worker"} 2.0' in app.metrics.exposition()


def test_frontend_hub_counts_disconnected_client_once(service):
    async def run():
        store = HangingStore()
        app = App(service, LimitsConfig(default_timeout_ms=10_000), store)
        hub, worker = make_hub(app)
        head = orjson.dumps({"method": "POST", "path": "/v1/rank", **HEAD})
        body = orjson.dumps({"user": "u", "candidates": ["1"]})
        hub.on_frame(worker, FrameKind.FORWARD, 1, len(head).to_bytes(4, "little") + head + body)
        await store.has_read.wait()
        hub.on_frame(worker, FrameKind.CANCEL, 1, b"")
        while worker.forwarded:
            await asyncio.sleep(0)
        return app.metrics.exposition()

    assert b"nestrec_http_requests_total{route" not in asyncio.run(run())


def test_frontend_app_calls_on_request_for_each_request():
    """The callback of each request keeps the CPU core of the engine process awake."""
    called = []
    replies = []

    async def run():
        remote = RemoteScoringService(ServiceConfig(), dict, lambda: None)
        app = FrontendApp(
            remote,
            LimitsConfig(),
            all_endpoints(),
            WorkerCounters(),
            connect=None,
            on_request=lambda: called.append(True),
        )
        for body in (b"{", b"[]"):
            await app.serve("/v1/rank", "c", body, replies.append)

    asyncio.run(run())
    assert [reply.status for reply in replies] == [400, 400]
    assert len(called) == 2


@pytest.mark.parametrize("has_grown", [False, True])
def test_frontend_hub_newer_version_rereads_request(service, has_grown):
    """If the new version has more items, an item that the worker did not know may be one of them."""
    current = service.deployment("retrieval")
    sender = RequestSource("c")
    keys = current.servable.item_keys[:-1] if has_grown else current.servable.item_keys
    before = replace(current, servable=replace(current.servable, version="before", item_keys=keys))
    hub, worker = make_hub(App(service, LimitsConfig(default_timeout_ms=10_000)))
    history = History(items=np.array([1]), times_ms=np.array([1]), actions=np.array([0]))
    candidates = Candidates(items=np.array([2, 0]), now_ms=2)
    slot, request = service.submit_rank(current, "u", history, candidates, timeout_s=10.0, sender=sender)
    request.future.result(10.0)
    service.release_slot(slot)

    async def make_reply():
        hub._loop = asyncio.get_running_loop()
        return hub._rank_reply(_RankCompletion(worker, 1, slot, before, sender, request))

    reply = asyncio.run(make_reply())
    assert reply.outcome == (SWAPPED if has_grown else OK)
    assert (reply.result is None) == has_grown
