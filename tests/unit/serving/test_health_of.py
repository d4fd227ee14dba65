"""What a supervisor takes for an answer of its instance, and for a start that failed."""

import json
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from nestrec.base.errors import UserError
from nestrec.serving.fleet import instance_supervisor
from nestrec.serving.fleet.instance_supervisor import LocalSupervisor, health_of

SAID = {
    200: ({"status": "live"}, "live"),
    503: ({"status": "dead"}, "dead"),
    403: ({"error": {"message": "only the front of this instance may ask it"}}, None),
}


@pytest.fixture(scope="module")
def port():
    class Handler(BaseHTTPRequestHandler):
        status = 200

        def do_GET(self):
            body = json.dumps(SAID[Handler.status][0]).encode()
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


@pytest.mark.parametrize("status", SAID)
def test_only_who_knows_the_front_has_answered_it(port, status):
    """An instance that refuses its supervisor refuses its front as well: it is of no use, and is to be replaced."""
    number, handler = port
    handler.status = status
    assert health_of(number, timeout_s=20.0) == SAID[status][1]


def test_a_process_that_ended_before_it_listened_has_failed_however_long_it_took(monkeypatch):
    """Loading a large model may fail after minutes: it was begun again and again, at once, and the front waited."""
    monkeypatch.setattr(instance_supervisor, "_SHORT_LIFE_S", 0.0)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with LocalSupervisor([], [], 1, start_timeout_s=5.0, stop_timeout_s=1.0) as started:
        with pytest.raises(UserError, match="did not start"):
            started.wait_until_up(lambda: False)
        assert started.slots[0].num_failures > 0, "it was not given up for its time"
