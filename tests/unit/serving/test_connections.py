"""Connection limits and allowed host names of a server."""

import resource

import pytest

from nestrec.serving.core.asgi import CLIENT_HEADER, AllowedHosts, client_of
from nestrec.serving.http.fast_request import Connections, address_of
from nestrec.serving.http.sockets import allow_open_files


def test_connections_per_address_are_bounded():
    connections = Connections(max_connections=100, max_per_address=3)
    assert [connections.opened(number, "a") for number in range(3)] == [None] * 3
    assert connections.opened("other", "b") is None
    connections.mark_busy(0)
    assert connections.opened(3, "a") == 1, "the oldest connection without a request in progress"
    connections.mark_busy(2)
    connections.mark_idle(2)
    assert connections.opened(4, "a") == 3, "a connection without requests before one that had a request"
    connections.mark_busy(4)
    assert connections.opened(5, "a") == 2
    connections.mark_busy(5)
    assert connections.opened(6, "a") == 6, "the new connection is closed if all others are busy"
    assert len(connections) == 5
    connections.closed(6)
    connections.closed(1)  # this connection was closed before
    assert len(connections) == 4


def test_connections_limit_closes_idle_of_largest_address():
    connections = Connections(max_connections=6, max_per_address=100)
    for number in range(4):
        assert connections.opened(("many", number), "many") is None
    for number in range(2):
        assert connections.opened(("few", number), "few") is None
        connections.mark_busy(("few", number))
        connections.mark_idle(("few", number))
    assert [connections.opened(("new", n), f"new{n}") for n in range(3)] == [("many", n) for n in range(3)]
    for connection in [("many", 3), *(("new", n) for n in range(3))]:
        connections.mark_busy(connection)
    assert connections.opened(("new", 3), "new3") == ("few", 0), (
        "the oldest idle connection, because all others are busy"
    )
    assert len(connections) == 6


def test_connections_of_one_ipv6_network_share_an_address():
    assert address_of(("2001:db8:1:2:3::4", 5)) == address_of(("2001:db8:1:2:9::", 6)) == "2001:db8:1:2::/64"
    assert address_of(("2001:db8:1:3::4", 5)) != address_of(("2001:db8:1:2::4", 5))
    assert address_of(("::ffff:10.0.0.1", 5)) == address_of(("10.0.0.1", 6)) == "10.0.0.1"
    assert (address_of(None), address_of(("fe80::1%eth0", 1)), address_of(("x:y", 1))) == ("", "fe80::/64", "x:y")


def test_client_header_is_trusted_only_from_local_frontend():
    """Otherwise, a client could get several shares of the device by using several names."""
    headers = [(b"host", b"a"), (CLIENT_HEADER, b"10.0.0.9")]
    assert client_of("127.0.0.1", headers) == client_of("::1", headers) == "10.0.0.9"
    assert client_of("10.0.0.1", headers) == "10.0.0.1"
    assert client_of("127.0.0.1", headers[:1]) == "127.0.0.1"
    assert len(client_of("127.0.0.1", [(CLIENT_HEADER, b"x" * 1000)])) == 64


@pytest.mark.parametrize(
    ("listens_on", "names", "accepted", "rejected"),
    [
        ("127.0.0.1", (), [b"localhost:1", b"127.0.0.1", b"10.0.0.1:80", b"[::1]", b"a.localhost"], [b"a.b", b""]),
        ("0.0.0.0", (), [b"a.b", b"a"], []),
        ("0.0.0.0", ("api.example",), [b"api.example:443", b"API.example.", b"10.1.1.1"], [b"b.example", b"example"]),
        ("127.0.0.1", ("*",), [b"a.b"], []),
        ("localhost", (), [b"localhost"], [b"a.b"]),
    ],
)  # fmt: skip
def test_allowed_hosts_accepts_and_rejects_host_headers(listens_on, names, accepted, rejected):
    hosts = AllowedHosts(listens_on, names)
    for _ in range(2):  # the second time from the cache
        assert [host in hosts for host in (*accepted, *rejected)] == [True] * len(accepted) + [False] * len(rejected)


def test_allow_open_files_raises_descriptor_limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
        assert allow_open_files(200)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 700
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
