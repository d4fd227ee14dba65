"""Responses that a supervisor accepts as health of its instance, and failed starts."""

import json
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from nestrec.base.errors import UserError
from nestrec.serving.fleet import instance_supervisor
from nestrec.serving.fleet.instance_supervisor import LocalSupervisor, health_of

RESPONSES = {
    200: ({"status": "live"}, "live"),
    503: ({"status": "dead"}, "dead"),
    403: ({"error": {"message": "this instance accepts requests only from its gateway"}}, None),
}


@pytest.fixture(scope="module")
def port():
    class Handler(BaseHTTPRequestHandler):
        status = 200

        def do_GET(self):
            body = json.dumps(RESPONSES[Handler.status][0]).encode()
            self.send_response(Handler.status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port, Handler
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("status", RESPONSES)
def test_health_probe_of_instance_that_rejects_gateway_fails(port, status):
    """An instance that rejects its supervisor also rejects its gateway, so it is not usable and must be replaced."""
    number, handler = port
    handler.status = status
    assert health_of(number, timeout_s=20.0) == RESPONSES[status][1]


def test_probe_process_that_exits_before_listening_failed(monkeypatch):
    """Regression test: an instance that failed after minutes of loading was restarted while the gateway waited."""
    monkeypatch.setattr(instance_supervisor, "_SHORT_LIFE_S", 0.0)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with LocalSupervisor([], [], 1, start_timeout_s=5.0, stop_timeout_s=1.0) as supervisor:
        with pytest.raises(UserError, match="did not start"):
            supervisor.wait_until_up(lambda: False)
        assert supervisor.slots[0].num_failures > 0, "the start must fail because of the exit, not because of a timeout"
