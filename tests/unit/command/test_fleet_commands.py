"""What commands for a fleet say where no server answers them."""

import socket
import threading

import pytest
from typer.testing import CliRunner

from nestrec.base.errors import UserError
from nestrec.cli.app import app
from nestrec.cli.fleet_output import KEY_VARIABLE, check_health, operate


@pytest.fixture
def peer():
    """Starts somebody who says these bytes to whoever connects, and is no server; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def start(said):
            def answer():
                connection, _ = listening.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(said)

            threading.Thread(target=answer, daemon=True).start()
            return listening.getsockname()[1]

        yield start


@pytest.mark.parametrize(
    ("scheme", "said", "remedy"),
    [
        ("http", b"", "one with TLS is asked by https://"),
        ("http", b"\x15\x03\x01\0\x02\x02F", "one with TLS is asked by https://"),
        ("https", b"HTTP/1.1 400 Bad Request\r\n\r\n", "one without is asked by http://"),
    ],
)
def test_who_asks_by_the_wrong_scheme_is_told_the_other_one(peer, scheme, said, remedy):
    with pytest.raises(UserError, match="does not answer") as refused:
        operate(f"{scheme}://127.0.0.1:{peer(said)}", "fleet")
    assert remedy in str(refused.value)


def test_redirect_is_named_and_not_followed(peer):
    port = peer(b"HTTP/1.1 302 Found\r\nlocation: https://other/v1\r\ncontent-length: 0\r\n\r\n")
    with pytest.raises(UserError, match="refuses with status 302") as refused:
        operate(f"http://127.0.0.1:{port}", "fleet")
    assert "redirects to, https://other/v1" in str(refused.value)


@pytest.mark.parametrize(("count", "told"), [(1, "1 instance\n"), (3, "3 instances\n")])
def test_scale_tells_how_many_there_are(peer, count, told):
    body = b'{"instances":%d}' % count
    port = peer(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    assert CliRunner().invoke(app, ["scale", f"127.0.0.1:{port}", str(count)]).output == told


@pytest.mark.parametrize("key", ["nr_secret\nnr_secret", "nr_sécret"])
def test_what_cannot_be_a_key_is_refused_and_not_shown(monkeypatch, key):
    monkeypatch.setenv(KEY_VARIABLE, key)
    with pytest.raises(UserError, match=KEY_VARIABLE) as refused:
        operate("http://127.0.0.1:1", "fleet")
    assert "cret" not in str(refused.value)


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_health_is_asked_by_an_address_with_or_without_its_scheme(peer, scheme):
    port = peer(b"HTTP/1.1 200 OK\r\n\r\n")
    check_health(f"{scheme}127.0.0.1:{port}")
