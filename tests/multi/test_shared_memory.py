"""Ranks of one host exchange through shared memory, and get what Gloo would have brought."""

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
from nestrec.distributed.collectives import all_to_all_rows, exchange
from nestrec.distributed.topology import ParallelConfig
from nestrec.distributed.transports import AllToAllPayload, SharedMemoryTransport, address, connect

KINDS = [torch.float32, torch.int64, torch.float16, torch.uint8]


def test_any_elements_arrive_as_over_gloo(pools):
    assert pools[4].run(exchange_by_both, 15) == [True] * 4


def exchange_by_both(topology: Topology, rounds: int) -> bool:
    """Shipments of several types, of none to many elements, written or ready; sizes go up and down."""
    gloo = Topology.of_process_group(torch.device("cpu"), ParallelConfig(exchange="collectives")).vectors
    assert isinstance(topology.vectors.transport, SharedMemoryTransport)
    assert not isinstance(gloo.transport, SharedMemoryTransport)
    everything_equal = True
    for number in range(rounds):
        draw = torch.Generator().manual_seed(number)
        for dtype in KINDS:
            shipment = _shipment(topology, draw, 10 ** (number % 5), dtype)
            sizes = shipment.send.tolist(), shipment.receive.tolist()
            expected = all_to_all_rows(gloo, shipment.sent(), *sizes)
            pieces = exchange(topology.vectors, shipment)
            everything_equal &= [len(piece) for piece in pieces] == sizes[1]
            everything_equal &= torch.equal(torch.cat(pieces), expected)
            everything_equal &= torch.equal(torch.cat(exchange(gloo, shipment)), expected)
            everything_equal &= torch.equal(all_to_all_rows(topology.vectors, shipment.sent(), *sizes), expected)
    return everything_equal


def _shipment(topology: Topology, draw: torch.Generator, most: int, dtype: torch.dtype) -> AllToAllPayload:
    counts = torch.randint(0, most, (topology.world, topology.world), generator=draw)
    counts[int(torch.randint(0, topology.world, (), generator=draw))] = 0  # a rank that sends nothing
    send, receive = counts[topology.rank].numpy(), counts[:, topology.rank].numpy()
    own = torch.Generator().manual_seed(topology.rank + most)
    sent = torch.randint(0, 100, (int(send.sum()),), generator=own).to(dtype)
    is_ready = bool(sent.sum() % 2)
    return AllToAllPayload(
        send, receive, sent, None if is_ready else lambda out: out.copy_(sent), sent if is_ready else None
    )


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_training_gives_the_same_bits_through_shared_memory_and_through_gloo(pools, num_micro_batches):
    for shared, gloo in pools[2].run(train_by_both, num_micro_batches):
        assert shared["losses"] == gloo["losses"]
        assert shared["digests"] == gloo["digests"]
        assert shared["sent"] == gloo["sent"]


def train_by_both(topology: Topology, num_micro_batches: int) -> list[dict]:
    gloo = Topology.of_process_group(torch.device("cpu"), ParallelConfig(exchange="collectives"))
    return [train(where, "rowwise_adagrad", 20, num_micro_batches, "float32") for where in (topology, gloo)]


def test_topologies_that_are_dropped_give_their_memory_back(pools):
    for before, after in pools[2].run(open_files):
        assert after <= before


def open_files(topology: Topology) -> tuple[int, int]:
    """Outboxes and lines to peers, before and after another topology."""
    before = _anonymous_files()
    other = Topology.of_process_group(torch.device("cpu"))
    made = _anonymous_files()
    assert made > before
    del other
    return before, _anonymous_files()


def _anonymous_files() -> int:
    return sum(
        "nestrec-outbox" in os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()
    )


def test_shared_memory_can_be_asked_for_and_declined(pools):
    assert pools[2].run(kinds_of_transport, "shared_memory") == [["SharedMemoryTransport"] * 3] * 2
    assert pools[2].run(kinds_of_transport, "collectives") == [["CollectiveTransport"] * 3] * 2


def kinds_of_transport(topology: Topology, exchange: str) -> list[str]:
    made = Topology.of_process_group(torch.device("cpu"), ParallelConfig(exchange=exchange))
    return [type(c.transport).__name__ for c in (made.keys, made.vectors, made.samples)]


@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
def test_ranks_of_another_network_do_not_hear_each_other():
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address(7))
        listener.listen(2)
        with ThreadPoolExecutor(1) as elsewhere:
            assert elsewhere.submit(is_heard).result()
            assert elsewhere.submit(leave_network).result() == 0
            assert not elsewhere.submit(is_heard).result()


def is_heard() -> bool:
    line = connect(7, timedelta(seconds=5))
    if line is not None:
        line.close()
    return line is not None


def leave_network() -> int:
    """The calling thread gets a network namespace of its own."""
    return ctypes.CDLL(None).unshare(0x40000000)


_kept: list[Topology] = []
"""A rank that drops its lines, or ends, is noticed in any case."""


def lose_a_peer(topology: Topology) -> str:
    """Rank 3 hangs up on rank 0 alone; what each rank of an exchange hears then."""
    _kept[:] = [Topology.of_process_group(torch.device("cpu"), ParallelConfig(), timeout_s=60.0)]
    vectors = _kept[0].vectors
    assert isinstance(vectors.transport, SharedMemoryTransport)
    if topology.rank == 3:
        vectors.transport._peers[0].hang_up()
    for _ in range(2):  # whoever got through the first has to hear of it in the second
        try:
            all_to_all_rows(vectors, torch.zeros(topology.world), [1] * topology.world, [1] * topology.world)
        except PeerLostError as error:
            return str(error)
    return "nothing"


def test_a_rank_that_has_lost_a_peer_hangs_up_on_the_others(pools):
    for heard in pools[4].run(lose_a_peer):
        assert "a peer was lost in vectors.all_to_all" in heard
        assert "no answer in time" not in heard
