"""Errors of fleet commands if the peer is not a nestrec server."""

import socket
import threading

import pytest
from typer.testing import CliRunner

from nestrec.base.errors import UserError
from nestrec.cli.app import app
from nestrec.cli.fleet_output import KEY_VARIABLE, call_admin_api, check_health


@pytest.fixture
def peer():
    """Yield a function that starts a TCP peer with a fixed response, and returns its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def start(response):
            def respond():
                connection, _ = listening.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(response)

            threading.Thread(target=respond, daemon=True).start()
            return listening.getsockname()[1]

        yield start


@pytest.mark.parametrize(
    ("scheme", "response", "remedy"),
    [
        ("http", b"", "with TLS, use https://"),
        ("http", b"\x15\x03\x01\0\x02\x02F", "with TLS, use https://"),
        ("https", b"HTTP/1.1 400 Bad Request\r\n\r\n", "without TLS, use http://"),
    ],
)
def test_admin_commands_name_the_right_scheme(peer, scheme, response, remedy):
    with pytest.raises(UserError, match="the request failed") as raised:
        call_admin_api(f"{scheme}://127.0.0.1:{peer(response)}", "fleet")
    assert remedy in str(raised.value)


def test_admin_commands_reject_redirects(peer):
    port = peer(b"HTTP/1.1 302 Found\r\nlocation: https://other/v1\r\ncontent-length: 0\r\n\r\n")
    with pytest.raises(UserError, match="rejected the request with status 302") as raised:
        call_admin_api(f"http://127.0.0.1:{port}", "fleet")
    assert "redirects to: https://other/v1" in str(raised.value)


@pytest.mark.parametrize(("count", "output"), [(1, "1 instance\n"), (3, "3 instances\n")])
def test_scale_prints_number_of_instances(peer, count, output):
    body = b'{"instances":%d}' % count
    port = peer(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    assert CliRunner().invoke(app, ["scale", f"127.0.0.1:{port}", str(count)]).output == output


def test_scale_of_single_server_explains_gateway(peer):
    body = b'{"error":{"message":"no such path"}}'
    port = peer(b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    error = CliRunner().invoke(app, ["scale", f"127.0.0.1:{port}", "3"]).exception
    assert str(error).startswith(f"server=http://127.0.0.1:{port}: the server is not a gateway")
    assert "Start a gateway with nestrec serve" in str(error)
    assert "--load_balancer gateway" in str(error)


@pytest.mark.parametrize("key", ["nr_secret\nnr_secret", "nr_sécret"])
def test_admin_key_invalid_value_is_rejected_and_hidden(monkeypatch, key):
    monkeypatch.setenv(KEY_VARIABLE, key)
    with pytest.raises(UserError, match=KEY_VARIABLE) as raised:
        call_admin_api("http://127.0.0.1:1", "fleet")
    assert "cret" not in str(raised.value)


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_health_accepts_address_with_or_without_scheme(peer, scheme):
    port = peer(b"HTTP/1.1 200 OK\r\n\r\n")
    check_health(f"{scheme}127.0.0.1:{port}")
