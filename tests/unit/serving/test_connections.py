"""Which connections give way, and under which names a server may be asked."""

import resource

import pytest

from nestrec.serving.core.asgi import CLIENT_HEADER, AllowedHosts, client_of
from nestrec.serving.http.fast_request import Connections, address_of
from nestrec.serving.http.sockets import allow_open_files


def test_an_address_has_at_most_its_own_connections_and_they_give_way_among_themselves():
    open_ones = Connections(most=100, most_an_address=3)
    assert [open_ones.opened(number, "a") for number in range(3)] == [None] * 3
    assert open_ones.opened("other", "b") is None
    open_ones.began(0)
    assert open_ones.opened(3, "a") == 1, "the oldest that is not being answered"
    open_ones.began(2)
    open_ones.ended(2)
    assert open_ones.opened(4, "a") == 3, "one that never asked before one that did"
    open_ones.began(4)
    assert open_ones.opened(5, "a") == 2
    open_ones.began(5)
    assert open_ones.opened(6, "a") == 6, "all of them are being answered"
    assert len(open_ones) == 5
    open_ones.closed(6)
    open_ones.closed(1)  # it has given way before
    assert len(open_ones) == 4


def test_beyond_the_most_the_address_with_most_silent_connections_gives_way():
    open_ones = Connections(most=6, most_an_address=100)
    for number in range(4):
        assert open_ones.opened(("many", number), "many") is None
    for number in range(2):
        assert open_ones.opened(("kept", number), "kept") is None
        open_ones.began(("kept", number))
        open_ones.ended(("kept", number))
    assert [open_ones.opened(("new", n), f"new{n}") for n in range(3)] == [("many", n) for n in range(3)]
    for connection in [("many", 3), *(("new", n) for n in range(3))]:
        open_ones.began(connection)
    assert open_ones.opened(("new", 3), "new3") == ("kept", 0), "nobody is silent"
    assert len(open_ones) == 6


def test_addresses_of_one_ipv6_network_count_as_one():
    assert address_of(("2001:db8:1:2:3::4", 5)) == address_of(("2001:db8:1:2:9::", 6)) == "2001:db8:1:2::/64"
    assert address_of(("2001:db8:1:3::4", 5)) != address_of(("2001:db8:1:2::4", 5))
    assert address_of(("::ffff:10.0.0.1", 5)) == address_of(("10.0.0.1", 6)) == "10.0.0.1"
    assert (address_of(None), address_of(("fe80::1%eth0", 1)), address_of(("x:y", 1))) == ("", "fe80::/64", "x:y")


def test_only_a_front_on_this_machine_may_name_its_client():
    """Else anybody could take as many shares of the device as there are names."""
    headers = [(b"host", b"a"), (CLIENT_HEADER, b"10.0.0.9")]
    assert client_of("127.0.0.1", headers) == client_of("::1", headers) == "10.0.0.9"
    assert client_of("10.0.0.1", headers) == "10.0.0.1"
    assert client_of("127.0.0.1", headers[:1]) == "127.0.0.1"
    assert len(client_of("127.0.0.1", [(CLIENT_HEADER, b"x" * 1000)])) == 64


@pytest.mark.parametrize(
    ("listens_on", "names", "taken", "refused"),
    [
        ("127.0.0.1", (), [b"localhost:1", b"127.0.0.1", b"10.0.0.1:80", b"[::1]", b"a.localhost"], [b"a.b", b""]),
        ("0.0.0.0", (), [b"a.b", b"a"], []),
        ("0.0.0.0", ("api.example",), [b"api.example:443", b"API.example.", b"10.1.1.1"], [b"b.example", b"example"]),
        ("127.0.0.1", ("*",), [b"a.b"], []),
        ("localhost", (), [b"localhost"], [b"a.b"]),
    ],
)  # fmt: skip
def test_hosts(listens_on, names, taken, refused):
    hosts = AllowedHosts(listens_on, names)
    for _ in range(2):  # the second time from memory
        assert [host in hosts for host in (*taken, *refused)] == [True] * len(taken) + [False] * len(refused)


def test_connections_may_be_open_as_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
        assert allow_open_files(200)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 700
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
