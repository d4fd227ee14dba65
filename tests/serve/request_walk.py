"""The walk of one ranking request through `nestrec serve` on a CPU: which files it enters, seen by tracing its calls.

`python tests/serve/request_walk.py` writes docs/architecture-request-walk.md.
"""

import json
import os
import sys
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path

from server_process import exchange, post, status_of

import nestrec
from nestrec.exporters.servable_writer import write_servable
from nestrec.models import HSTUConfig
from nestrec.serving.http.serve_config import ServeConfig
from nestrec.serving.http.signals import SignalHandler
from nestrec.serving.server import serve
from nestrec_bench.harness.random_model import random_ranking
from support.command_runner import piped

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture-request-walk.md"
TOOLS = ("base", "trace", "ops")
"""Folders that every part uses: their files are not stops on the way."""
WHAT_HAPPENS = {
    "serving/http/limited_http.py": "bytes become a request, within the limits on connections, heads and bodies",
    "serving/core/asgi.py": "the id and the client of the request; later the bytes of the response",
    "serving/security/server_security.py": "the gate: may this client use this route (with keys also `auth`)",
    "serving/http/fast_request.py": "a request that arrived whole skips ASGI",
    "serving/http/http_app.py": "the route; under overload, rejection before the body is parsed",
    "serving/service/inference_service.py": "the version in service, and the engine of this user",
    "serving/engine/serving_engine.py": "submit; then admit, schedule, launch, complete on the engine's thread",
    "serving/engine/batch_scheduler.py": "the requests that form the next batch",
    "serving/engine/fair_queue.py": "the order of requests, with equal shares for clients and their users",
    "serving/inputs/json_long_lists.py": "JSON, with long lists as arrays",
    "serving/inputs/request_schema.py": "every field checked against its declaration",
    "serving/core/typed_list.py": "the types of the values of a list",
    "serving/http/endpoints/rank_endpoints.py": "the handler: resolve, score, respond",
    "serving/inputs/request_resolver.py": "names of items and features become ids of the model",
    "serving/model/servable.py": "the loaded model: what it reads of a request",
    "serving/model/item_id_map.py": "item names become item ids",
    "serving/model/servable_spec.py": "the columns of the model, and the version that responses show",
    "serving/model/request_inputs.py": "the history and the candidates as arrays",
    "serving/core/slot_router.py": "the engine whose cache has this user's prefix",
    "serving/model/ranking_adapter.py": "histories and candidates become tokens and vectors, states become scores",
    "data/flat_arrays.py": "the first event of a history that the model reads, as in training",
    "serving/model/model_adapter.py": "the tokens of a history, and how much of it can be cached",
    "models/backbone_spec.py": "which tokens each layer attends to",
    "serving/kv_cache/prefix_cache.py": "the pages that hold the user's prefix",
    "serving/kv_cache/tiered_prefix_cache.py": "a prefix found, extended, copied to or from host memory",
    "serving/core/cost_model.py": "predicted and measured seconds of a batch",
    "serving/engine/admission.py": "whether the request would be in time",
    "serving/kv_cache/preinfer_trigger.py": "the request is counted: it decides how many prefixes are computed ahead",
    "serving/inputs/engine_request.py": "the request inside the engine",
    "serving/engine/batch_pacer.py": "when to schedule, and how to wait until then",
    "serving/engine/reference_runner.py": "the batch on the device (a GPU has `graph_runner`)",
    "serving/model/served_tables.py": "rows of the embedding tables",
    "models/cached/cached_forwards.py": "the layers, over cached keys and values",
    "models/sequence.py": "positions of the new tokens",
    "serving/kv_cache/kv_page_pool.py": "keys and values, read from and written to pages",
    "serving/history_store/memory_store.py": "the stored events of the user (or `redis_store`)",
    "serving/history_store/history_codec.py": "events unpacked from the bytes of the store",
    "serving/inputs/stored_history.py": "events cut to what the present model reads",
}
IN_PASSING = {
    "serving/core/tracing.py": "spans, if they are on",
    "serving/http/server_metrics.py": "counters and latencies",
}
"""Files that observe the request and do nothing to it, as `trace` does in training: they are listed, not counted."""
USER = "ann"
HISTORY = {
    "items": ["1", "2", "3"],
    "times_ms": [1, 2, 3],
    "actions": [["click"], [], ["like"]],
    "features": {"tab": ["home", "home", "search"]},
}
RANK = {"user": USER, "candidates": ["5", "9"], "context": {"tab": "home"}}


class CallTracer:
    """A profile function that records, in order, the files of `nestrec` whose functions a request enters."""

    def __init__(self):
        self.files = None
        """files so far; None while nothing is recorded"""
        self._is_armed = False
        self._root = str(Path(nestrec.__file__).parent) + os.sep

    def __call__(self, frame, event, argument):
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(self._root):
            return
        if self._is_armed and frame.f_code.co_name == "data_received":  # the bytes of the request
            self._is_armed = False
            self.files = []
        if self.files is not None:
            self.files.append(file.removeprefix(self._root).replace(os.sep, "/"))

    def trace(self, ask):
        """Returns the files that each of several equal requests enters: timers of the server run in few of them."""
        traces = []
        for _ in range(3):
            self._is_armed = True
            ask()
            traces.append(dict.fromkeys(self.files))
            self.files = None
        return [file for file in traces[0] if all(file in trace for trace in traces)]


def serve_and_trace(folder, output):
    """Serve a model in this process, send it requests, and write which files these enter."""
    tracer = CallTracer()
    threading.setprofile(tracer)  # the engine's thread starts with the server
    sys.setprofile(tracer)
    signals = SignalHandler.installed()

    def ask(path, body):
        response = exchange(port_of.result(), post(path, body))
        assert status_of(response) in (200, 202), response

    def send():
        try:
            ask("/v1/rank", RANK | {"history": HISTORY})  # the first request fills caches
            found = tracer.trace(lambda: ask("/v1/rank", RANK | {"history": HISTORY}))
            ask("/v1/events", {"user": USER, "history": HISTORY})
            ask("/v1/rank", RANK)
            stored = tracer.trace(lambda: ask("/v1/rank", RANK))
            Path(output).write_text(json.dumps([found, stored]))
        finally:
            signals.stop()

    port_of = Future()
    client = threading.Thread(target=send)
    client.start()
    serve([folder], ServeConfig(port=0), signals, lambda url: port_of.set_result(int(url.rpartition(":")[2])))
    client.join()


def walk():
    """Returns the files that a ranking request with a history enters, and those of one whose history is stored."""
    encoder = HSTUConfig(dim=16, num_layers=2, num_heads=2, max_length=32, head_dim=8, time_bias=True)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "model"
        output = Path(root) / "walk.json"
        write_servable(random_ranking(encoder, num_items=200), folder)
        code = f"import request_walk; request_walk.serve_and_trace({str(folder)!r}, {str(output)!r})"
        process = piped([sys.executable, "-c", code], {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        with process.stdout:
            said = process.stdout.read().decode()
        process.wait()
        assert output.exists(), said
        return json.loads(output.read_text())


def stops(files):
    """Returns the files that count."""
    return [file for file in files if file not in IN_PASSING and file.split("/")[0] not in TOOLS]


def page(found, stored):
    lines = [f"1. `{file}`: {WHAT_HAPPENS.get(file, 'not described yet')}" for file in stops(found)]
    more = [f"- `{file}`: {WHAT_HAPPENS.get(file, 'not described yet')}" for file in stops(stored) if file not in found]
    passed = [f"- `{file}`: {IN_PASSING[file]}" for file in found if file in IN_PASSING]
    return f"""# The walk of one ranking request

One ranking request goes through {len(lines)} files of `nestrec`, in this order of first entry.

How it is counted: `nestrec serve` runs on a CPU with its default options, in one process. A client sends a ranking
request with a history of which the server has cached the keys and values, and all calls are traced, from the arrival of
the bytes to the end of the connection. A file counts if one of its functions is entered. The folders `base`, `trace`
and `ops` are not counted, since every part uses them. `python tests/serve/request_walk.py` writes this page.

{chr(10).join(lines)}

Two files observe the request and do nothing to it, so they are not counted:

{chr(10).join(passed)}

A request without a history is answered from the events that the server stores. It enters in addition:

{chr(10).join(more)}
"""


if __name__ == "__main__":
    PAGE.write_text(page(*walk()))
