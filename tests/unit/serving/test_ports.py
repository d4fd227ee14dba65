import socket
from pathlib import Path

import pytest

from nestrec.base.errors import UserError
from nestrec.serving.fleet import readiness_probes
from nestrec.serving.fleet.readiness_probes import free_port, is_listening, reserve_port
from nestrec.serving.http.sockets import bind_sockets, close_all

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.mark.skipif(not EPHEMERAL.exists(), reason="only Linux publishes the range")
def test_free_port_is_outside_ephemeral_range():
    first = int(EPHEMERAL.read_text().split()[0])
    assert all(free_port() < first for _ in range(200))


def test_free_port_is_not_in_use(monkeypatch):
    taken = free_port()
    with socket.socket() as other:
        other.bind(("127.0.0.1", taken))
        other.listen()
        monkeypatch.setattr(readiness_probes, "_LOWEST", taken)
        monkeypatch.setattr(readiness_probes, "_first_ephemeral", lambda: taken + 1)
        assert free_port() != taken
        assert is_listening(taken)
    assert not is_listening(taken)


def test_reserved_port_passes_between_processes(monkeypatch):
    """Regression test: between two processes of an instance, another process could take the port permanently."""
    with reserve_port() as reservation:
        port = reservation.getsockname()[1]
        monkeypatch.setattr(readiness_probes, "_LOWEST", port)
        monkeypatch.setattr(readiness_probes, "_first_ephemeral", lambda: port + 1)
        for _ in range(2):
            with reserve_port() as other:
                assert other.getsockname()[1] != port, "a reserved port must not be reserved again"
            assert not is_listening(port), "a reservation must not listen"
            with pytest.raises(UserError, match="in use"):
                bind_sockets("127.0.0.1", port)
            sockets = bind_sockets("127.0.0.1", port, is_shared=True)
            sockets[0].listen()
            assert is_listening(port)
            with pytest.raises(UserError, match="in use"):
                bind_sockets("", port)
            close_all(sockets)
    close_all(bind_sockets("127.0.0.1", port))


def test_self_connection_is_not_a_listener(monkeypatch):
    connect = socket.create_connection

    def connect_from_same_port(address, timeout):
        return connect(address, timeout, source_address=address)  # the system may choose this port at random

    port = free_port()
    monkeypatch.setattr(socket, "create_connection", connect_from_same_port)
    socket.create_connection(("127.0.0.1", port), 1.0).close()  # such a connection succeeds
    assert not is_listening(port)
