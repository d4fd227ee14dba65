"""Files that one ranking request enters in `nestrec serve` on a CPU, found by tracing its function calls.

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
from support.command_runner import start_piped

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture-request-walk.md"
TOOLS = ("base", "trace", "ops")
"""Folders that every part uses; their files are not counted."""
WHAT_HAPPENS = {
    "serving/http/limited_http.py": "parses bytes to a request, within the limits on connections, headers and bodies",
    "serving/core/asgi.py": "determines the id and the client of the request; later writes the bytes of the response",
    "serving/security/server_security.py": "checks whether the client may use the route (with API keys also `auth`)",
    "serving/http/fast_request.py": "handles a request that arrived completely, without ASGI",
    "serving/http/http_app.py": "finds the route; under overload, rejects before the body is parsed",
    "serving/service/inference_service.py": "selects the model version and the engine of the user",
    "serving/engine/serving_engine.py": "queues the request; its thread admits, schedules, launches and completes it",
    "serving/engine/batch_scheduler.py": "selects the requests that form the next batch",
    "serving/engine/fair_queue.py": "orders requests, with equal shares for clients and their users",
    "serving/inputs/json_long_lists.py": "parses JSON, with long lists as arrays",
    "serving/inputs/request_schema.py": "checks every field against its declaration",
    "serving/core/typed_list.py": "checks the types of the values of a list",
    "serving/http/endpoints/rank_endpoints.py": "handles the request: resolves ids, scores, responds",
    "serving/inputs/request_resolver.py": "converts names of items and features to ids of the model",
    "serving/model/servable.py": "the loaded model, which declares its inputs",
    "serving/model/item_id_map.py": "converts item names to item ids",
    "serving/model/servable_spec.py": "the columns of the model, and the version that responses contain",
    "serving/model/request_inputs.py": "holds the history and the candidates as arrays",
    "serving/core/slot_router.py": "selects the engine whose cache has the user's prefix",
    "serving/model/ranking_adapter.py": "converts histories and candidates to tokens and vectors, and states to scores",
    "data/flat_arrays.py": "determines the first event of a history that the model reads, as in training",
    "serving/model/model_adapter.py": "determines the tokens of a history, and the part that can be cached",
    "models/backbone_spec.py": "determines the tokens that each layer attends to",
    "serving/kv_cache/prefix_cache.py": "finds the pages of the user's prefix",
    "serving/kv_cache/tiered_prefix_cache.py": "finds and extends the prefix, copies it to or from host memory",
    "serving/core/cost_model.py": "predicts the seconds of a batch, and learns from the measured ones",
    "serving/engine/admission.py": "estimates whether the request would meet its deadline",
    "serving/kv_cache/preinfer_trigger.py": "counts the request, for decisions about prefill ahead of time",
    "serving/inputs/engine_request.py": "represents the request inside the engine",
    "serving/engine/batch_pacer.py": "determines when to schedule, and waits until then",
    "serving/engine/reference_runner.py": "runs the batch on the device (`graph_runner` on a GPU)",
    "serving/model/served_tables.py": "reads rows of the embedding tables",
    "models/cached/cached_forwards.py": "computes the layers with cached keys and values",
    "models/sequence.py": "computes positions of the new tokens",
    "serving/kv_cache/kv_page_pool.py": "reads and writes keys and values in pages",
    "serving/history_store/memory_store.py": "returns the stored events of the user (or `redis_store`)",
    "serving/history_store/history_codec.py": "decodes events from the bytes of the store",
    "serving/inputs/stored_history.py": "selects the inputs of the current model from stored events",
}
IN_PASSING = {
    "serving/core/tracing.py": "records spans, if tracing is enabled",
    "serving/http/server_metrics.py": "updates counters and latencies",
}
"""Files that only observe the request, as `trace` does in training; they are listed, but not counted."""
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
        """Files entered so far, in order; None while recording is off."""
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

    def trace(self, send):
        """Return the files that all of three equal requests enter, which excludes timers of the server.

        Args:
            send: Function that sends one request and waits for its response.
        """
        traces = []
        for _ in range(3):
            self._is_armed = True
            send()
            traces.append(dict.fromkeys(self.files))
            self.files = None
        return [file for file in traces[0] if all(file in trace for trace in traces)]


def serve_and_trace(folder, output):
    """Serve a model in this process, send requests, and write the files that they enter.

    Args:
        folder: Servable folder of the model.
        output: JSON file for the result.
    """
    tracer = CallTracer()
    threading.setprofile(tracer)  # the engine's thread starts with the server
    sys.setprofile(tracer)
    signals = SignalHandler.installed()

    def send(path, body):
        response = exchange(port.result(), post(path, body))
        assert status_of(response) in (200, 202), response

    def send_all():
        try:
            send("/v1/rank", RANK | {"history": HISTORY})  # the first request fills caches
            found = tracer.trace(lambda: send("/v1/rank", RANK | {"history": HISTORY}))
            send("/v1/events", {"user": USER, "history": HISTORY})
            send("/v1/rank", RANK)
            stored = tracer.trace(lambda: send("/v1/rank", RANK))
            Path(output).write_text(json.dumps([found, stored]))
        finally:
            signals.stop()

    port = Future()
    client = threading.Thread(target=send_all)
    client.start()
    serve([folder], ServeConfig(port=0), signals, lambda url: port.set_result(int(url.rpartition(":")[2])))
    client.join()


def walk():
    """Return the files that a ranking request with a history enters, and those of a request with a stored history."""
    encoder = HSTUConfig(dim=16, num_layers=2, num_heads=2, max_length=32, head_dim=8, time_bias=True)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "model"
        output = Path(root) / "walk.json"
        write_servable(random_ranking(encoder, num_items=200), folder)
        code = f"import request_walk; request_walk.serve_and_trace({str(folder)!r}, {str(output)!r})"
        process = start_piped([sys.executable, "-c", code], {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        with process.stdout:
            log = process.stdout.read().decode()
        process.wait()
        assert output.exists(), log
        return json.loads(output.read_text())


def stops(files):
    """Return the files that are counted."""
    return [file for file in files if file not in IN_PASSING and file.split("/")[0] not in TOOLS]


def page(found, stored):
    """Return the text of the page."""
    lines = [f"1. `{file}`: {WHAT_HAPPENS.get(file, 'not described yet')}" for file in stops(found)]
    more = [f"- `{file}`: {WHAT_HAPPENS.get(file, 'not described yet')}" for file in stops(stored) if file not in found]
    passed = [f"- `{file}`: {IN_PASSING[file]}" for file in found if file in IN_PASSING]
    return f"""# The path of one ranking request

This page lists the files of `nestrec` through which a ranking request passes, for contributors who want to read the
code. [KV cache](concepts/kv-cache.md) explains the parts. One request passes through {len(lines)} files, in this order
of first entry.

The files are counted as follows: `nestrec serve` runs on a CPU with its default options, in one process. A client sends
a ranking request with a history whose keys and values are cached, and all calls are traced, from the arrival of the
bytes to the end of the connection. A file counts if one of its functions is entered. The folders `base`, `trace` and
`ops` are not counted, since every part uses them. `python tests/serve/request_walk.py` writes this page.

{chr(10).join(lines)}

Two files only observe the request, so they are not counted:

{chr(10).join(passed)}

For a request without a history, the server reads the stored events of the user. It enters these additional files:

{chr(10).join(more)}
"""


if __name__ == "__main__":
    PAGE.write_text(page(*walk()))
