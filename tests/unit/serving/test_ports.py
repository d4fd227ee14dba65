import socket
from pathlib import Path

import pytest

from nestrec.base.errors import UserError
from nestrec.serving.fleet import readiness_probes
from nestrec.serving.fleet.readiness_probes import free_port, held_port, listens
from nestrec.serving.http.sockets import bound_sockets, close_all

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
        monkeypatch.setattr(readiness_probes, "_LOWEST", taken)
        monkeypatch.setattr(readiness_probes, "_first_ephemeral", lambda: taken + 1)
        assert free_port() != taken
        assert listens(taken)
    assert not listens(taken)


def test_a_port_that_is_held_goes_to_one_process_after_the_other_and_to_nobody_else(monkeypatch):
    """Between two processes of an instance, too: whoever took it there kept the instance away for ever."""
    with held_port() as held:
        port = held.getsockname()[1]
        monkeypatch.setattr(readiness_probes, "_LOWEST", port)
        monkeypatch.setattr(readiness_probes, "_first_ephemeral", lambda: port + 1)
        for _ in range(2):
            with held_port() as other:
                assert other.getsockname()[1] != port, "what is shared is not held twice"
            assert not listens(port), "who holds it does not listen"
            with pytest.raises(UserError, match="in use"):
                bound_sockets("127.0.0.1", port)
            ours = bound_sockets("127.0.0.1", port, is_shared=True)
            ours[0].listen()
            assert listens(port)
            with pytest.raises(UserError, match="in use"):
                bound_sockets("", port)
            close_all(ours)
    close_all(bound_sockets("127.0.0.1", port))


def test_a_connection_that_meets_itself_is_nobody_who_listens(monkeypatch):
    connect = socket.create_connection

    def from_the_same_port(address, timeout):
        return connect(address, timeout, source_address=address)  # what the system does by chance

    port = free_port()
    monkeypatch.setattr(socket, "create_connection", from_the_same_port)
    socket.create_connection(("127.0.0.1", port), 1.0).close()  # it does come about
    assert not listens(port)
