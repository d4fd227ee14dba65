"""All-to-all through shared memory between ranks of one host, compared with Gloo."""

import ctypes
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from engine_jobs import train

from nestrec.base.errors import PeerLostError
from nestrec.distributed import Topology
from nestrec.distributed.collectives import all_to_all_payload, all_to_all_rows
from nestrec.distributed.topology import ParallelConfig
from nestrec.distributed.transports import AllToAllPayload, SharedMemoryTransport, address, connect

KINDS = [torch.float32, torch.int64, torch.float16, torch.uint8]


def test_shared_memory_all_to_all_equals_gloo(pools):
    assert pools[4].run(exchange_by_both, 15) == [True] * 4


def exchange_by_both(topology: Topology, rounds: int) -> bool:
    """Exchange payloads of several types and of 0 to many elements, with and without a write function.

    The sizes increase and decrease.
    """
    gloo = Topology.of_process_group(torch.device("cpu"), ParallelConfig(transport="collectives")).vectors
    assert isinstance(topology.vectors.transport, SharedMemoryTransport)
    assert not isinstance(gloo.transport, SharedMemoryTransport)
    everything_equal = True
    for number in range(rounds):
        draw = torch.Generator().manual_seed(number)
        for dtype in KINDS:
            payload = _random_payload(topology, draw, 10 ** (number % 5), dtype)
            sizes = payload.send.tolist(), payload.receive.tolist()
            expected = all_to_all_rows(gloo, payload.to_tensor(), *sizes)
            received = all_to_all_payload(topology.vectors, payload)
            everything_equal &= [len(part) for part in received] == sizes[1]
            everything_equal &= torch.equal(torch.cat(received), expected)
            everything_equal &= torch.equal(torch.cat(all_to_all_payload(gloo, payload)), expected)
            everything_equal &= torch.equal(all_to_all_rows(topology.vectors, payload.to_tensor(), *sizes), expected)
    return everything_equal


def _random_payload(topology: Topology, draw: torch.Generator, bound: int, dtype: torch.dtype) -> AllToAllPayload:
    counts = torch.randint(0, bound, (topology.world, topology.world), generator=draw)
    counts[int(torch.randint(0, topology.world, (), generator=draw))] = 0  # a rank that sends nothing
    send, receive = counts[topology.rank].numpy(), counts[:, topology.rank].numpy()
    rank_draw = torch.Generator().manual_seed(topology.rank + bound)
    sent = torch.randint(0, 100, (int(send.sum()),), generator=rank_draw).to(dtype)
    is_ready = bool(sent.sum() % 2)
    return AllToAllPayload(
        send, receive, sent, None if is_ready else lambda out: out.copy_(sent), sent if is_ready else None
    )


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_shared_memory_transport_equals_gloo(pools, num_micro_batches):
    for shared, gloo in pools[2].run(train_by_both, num_micro_batches):
        assert shared["losses"] == gloo["losses"]
        assert shared["digests"] == gloo["digests"]
        assert shared["sent"] == gloo["sent"]


def train_by_both(topology: Topology, num_micro_batches: int) -> list[dict]:
    gloo = Topology.of_process_group(torch.device("cpu"), ParallelConfig(transport="collectives"))
    return [train(each, "rowwise_adagrad", 20, num_micro_batches, "float32") for each in (topology, gloo)]


def test_shared_memory_of_deleted_topology_is_released(pools):
    for before, after in pools[2].run(open_files):
        assert after <= before


def open_files(topology: Topology) -> tuple[int, int]:
    """Return the number of shared buffers before another topology is created and after it was deleted."""
    before = _anonymous_files()
    other = Topology.of_process_group(torch.device("cpu"))
    with_other = _anonymous_files()
    assert with_other > before
    del other
    return before, _anonymous_files()


def _anonymous_files() -> int:
    return sum(
        "nestrec-outbox" in os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()
    )


def test_shared_memory_transport_is_optional(pools):
    assert pools[2].run(kinds_of_transport, "shared_memory") == [["SharedMemoryTransport"] * 3] * 2
    assert pools[2].run(kinds_of_transport, "collectives") == [["CollectiveTransport"] * 3] * 2


def kinds_of_transport(topology: Topology, transport: str) -> list[str]:
    created = Topology.of_process_group(torch.device("cpu"), ParallelConfig(transport=transport))
    return [type(c.transport).__name__ for c in (created.keys, created.vectors, created.samples)]


@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
def test_shared_memory_does_not_connect_across_networks():
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address(7))
        listener.listen(2)
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(can_connect).result()
            assert thread.submit(leave_network).result() == 0
            assert not thread.submit(can_connect).result()


def can_connect() -> bool:
    connection = connect(7, timedelta(seconds=5))
    if connection is not None:
        connection.close()
    return connection is not None


def leave_network() -> int:
    """Move the calling thread to a new network namespace."""
    return ctypes.CDLL(None).unshare(0x40000000)


_open_topologies: list[Topology] = []
"""References that keep topologies open, because a closed connection would be noticed in any case."""


def lose_a_peer(topology: Topology) -> str:
    """Close the connection from rank 3 to rank 0, and return the error of each rank in an all-to-all."""
    _open_topologies[:] = [Topology.of_process_group(torch.device("cpu"), ParallelConfig(), timeout_s=60.0)]
    vectors = _open_topologies[0].vectors
    assert isinstance(vectors.transport, SharedMemoryTransport)
    if topology.rank == 3:
        vectors.transport._peers[0].shut_down()
    for _ in range(2):  # ranks that completed the first all-to-all must fail in the second
        try:
            all_to_all_rows(vectors, torch.zeros(topology.world), [1] * topology.world, [1] * topology.world)
        except PeerLostError as error:
            return str(error)
    return "no error"


def test_shared_memory_peer_failure_reaches_all_ranks(pools):
    for error in pools[4].run(lose_a_peer):
        assert "peer was lost in vectors.all_to_all" in error
        assert "no response in time" not in error
