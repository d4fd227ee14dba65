import socket
from pathlib import Path

import pytest

from nestrec.serving.many import ports
from nestrec.serving.many.ports import free_port, listens

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.mark.skipif(not EPHEMERAL.exists(), reason="the range is told by Linux alone")
def test_a_port_for_a_process_to_come_is_none_that_the_system_hands_out():
    first = int(EPHEMERAL.read_text().split()[0])
    assert all(free_port() < first for _ in range(200))


def test_a_port_that_somebody_has_is_not_free(monkeypatch):
    taken = free_port()
    with socket.socket() as other:
        other.bind(("127.0.0.1", taken))
        other.listen()
        monkeypatch.setattr(ports, "_LOWEST", taken)
        monkeypatch.setattr(ports, "_first_ephemeral", lambda: taken + 1)
        assert free_port() != taken
        assert listens(taken)
    assert not listens(taken)


def test_a_connection_that_meets_itself_is_nobody_who_listens(monkeypatch):
    connect = socket.create_connection

    def from_the_same_port(address, timeout):
        return connect(address, timeout, source_address=address)  # what the system does by chance

    port = free_port()
    monkeypatch.setattr(socket, "create_connection", from_the_same_port)
    socket.create_connection(("127.0.0.1", port), 1.0).close()  # it does come about
    assert not listens(port)
