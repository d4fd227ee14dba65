"""Transports: implementations of all-to-all and other collectives that move tensors between ranks.

collectives    torch.distributed: NCCL between GPUs, Gloo between hosts
host           device to pinned host memory, Gloo, host to device: for any network and for several ranks per device;
               uses only the copy engines of a GPU
copy_engine    peer copies between devices of one NVLink domain, from symmetric memory that every peer has mapped
shared_memory  all-to-all between CPU processes of one host through shared memory

With every transport but NCCL the calling thread waits for the exchange; the pipeline has a separate lane for it.

With the shared-memory transport, no payload passes through a socket. A rank writes its payload to a shared buffer,
sends each peer the offset of its part, and copies its own parts from the buffers of its peers. Each rank has two
buffers that it uses alternately: a peer that has sent the offset of its next exchange has finished reading the previous
one, so a buffer is free again when it is reused. Collectives other than all-to-all use Gloo.

Shared buffers are anonymous files (memfd) and peers communicate through sockets in the abstract namespace. So a killed
rank leaves nothing behind, and its peers notice at once.
"""

import contextlib
import mmap
import os
import secrets
import socket
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from nestrec.base.compat import symmetric_memory
from nestrec.base.cuda import copy_to_device, on_stream, pinned_like, side_stream, to_host

_GROWTH = 1.25


Sizes = Sequence[int]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a contiguous tensor as bytes."""
    if tensor.numel() == 0:
        return tensor.new_empty(0, dtype=torch.uint8)
    return tensor.view(-1).view(torch.uint8)


class Transport(Protocol):
    """Interface of collectives between the ranks of one process group."""

    def all_to_all(self, into: torch.Tensor, sent: torch.Tensor, receive: Sizes, send: Sizes) -> None:
        """Exchange bytes: `send[r]` bytes of `sent` go to rank r, `receive[r]` bytes of `into` are received from it."""
        ...

    def exchange(self, payload: "AllToAllPayload") -> list[torch.Tensor]:
        """Exchange a payload.

        Returns:
            The received elements in order of source rank: one tensor, or one tensor per source. They may be views of a
            reused buffer and are valid until the next exchange.
        """
        like = payload.like
        size = like.element_size()
        received = like.new_empty(int(payload.receive.sum()))
        receive = (payload.receive * size).tolist()
        send = (payload.send * size).tolist()
        self.all_to_all(as_bytes(received), as_bytes(payload.to_tensor()), receive, send)
        return [received]

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over all ranks, in place."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> None: ...

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, which have the same shape."""
        ...


class CollectiveTransport(Transport):
    """Collectives of the process group's own backend."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all_to_all(self, into: torch.Tensor, sent: torch.Tensor, receive: Sizes, send: Sizes) -> None:
        dist.all_to_all_single(into, sent, list(receive), list(send), group=self._group)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=self._group)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        dist.broadcast(tensor, group=self._group, group_src=source)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self._group.size())]
        dist.all_gather(gathered, tensor.contiguous(), group=self._group)
        return gathered


class DeviceStagedTransport(CollectiveTransport):
    """Device collectives (NCCL) for host tensors such as keys, staged through pinned memory.

    They run on a separate stream, so that waiting for keys does not wait for other device work. Device tensors use the
    device collectives directly.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self._device = device
        self._stream = side_stream(device, is_urgent=True)

    def all_to_all(self, into: torch.Tensor, sent: torch.Tensor, receive: Sizes, send: Sizes) -> None:
        if into.is_cuda:
            super().all_to_all(into, sent, receive, send)
            return
        with on_stream(self._stream):
            received = torch.empty_like(into, device=self._device)
            super().all_to_all(received, self._to_device(sent), receive, send)
            into.copy_(self._to_host(received))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        if tensor.is_cuda:
            super().all_reduce(tensor)
            return
        with on_stream(self._stream):
            total = self._to_device(tensor)
            super().all_reduce(total)
            tensor.copy_(self._to_host(total))

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        if tensor.is_cuda:
            super().broadcast(tensor, source)
            return
        with on_stream(self._stream):
            value = self._to_device(tensor)
            super().broadcast(value, source)
            tensor.copy_(self._to_host(value))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if tensor.is_cuda:
            return super().all_gather(tensor)
        with on_stream(self._stream):
            return list(self._to_host(torch.stack(super().all_gather(self._to_device(tensor)))))

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return copy_to_device(tensor, self._device)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to host memory and wait for the current stream only."""
        return to_host(tensor).wait()


class HostStagedTransport(Transport):
    """Gloo collectives for device tensors, staged through pinned host memory. Host tensors go to Gloo directly."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._inner = CollectiveTransport(group)

    def all_to_all(self, into: torch.Tensor, sent: torch.Tensor, receive: Sizes, send: Sizes) -> None:
        received = _host_like(into)
        self._inner.all_to_all(received, to_host(sent).wait(), receive, send)
        _from_host(into, received)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        total = to_host(tensor).wait()
        self._inner.all_reduce(total)
        _from_host(tensor, total)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        value = to_host(tensor).wait()
        self._inner.broadcast(value, source)
        _from_host(tensor, value)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [part.to(tensor.device) for part in self._inner.all_gather(to_host(tensor).wait())]


class CopyEngineTransport(HostStagedTransport):
    """All-to-all by peer copies: a rank writes its payload to symmetric memory, and its peers copy their parts from it.

    Offsets and synchronization are exchanged between the hosts, so no kernel waits on the device. Collectives other
    than all-to-all go through the host.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self._group = group
        self._device = device
        self._rank = group.rank()
        self._size = group.size()
        self._buffer: torch.Tensor | None = None
        self._peers: list[torch.Tensor] = []
        self._copied: torch.cuda.Event | None = None

    def all_to_all(self, into: torch.Tensor, sent: torch.Tensor, receive: Sizes, send: Sizes) -> None:
        if not into.is_cuda:
            super().all_to_all(into, sent, receive, send)
            return
        starts = self._starts_of_all(send)
        assert self._buffer is not None
        self._buffer[: len(sent)].copy_(sent)
        torch.cuda.current_stream(self._device).synchronize()
        self._inner.all_reduce(torch.zeros(1))  # barrier: all ranks have written their payloads
        position = 0
        for rank, size in enumerate(receive):
            start = starts[rank][self._rank]
            into[position : position + size].copy_(self._peers[rank][start : start + size], non_blocking=True)
            position += size
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(self._device))

    def peer_buffer(self, rank: int) -> torch.Tensor:
        """Return the symmetric-memory buffer of a rank as mapped in this process, as bytes."""
        return self._peers[rank]

    def _starts_of_all(self, send: Sizes) -> list[list[int]]:
        """Return [source][target] offsets of the target's bytes in the source's buffer.

        When it returns, no rank reads the bytes of the previous exchange any more.
        """
        if self._copied is not None:
            self._copied.synchronize()
        ends = torch.tensor(list(send)).cumsum(0)
        ends_of_all = torch.stack(self._inner.all_gather(ends))
        self._reserve(int(ends_of_all[:, -1].max()))
        starts: list[list[int]] = (
            ends_of_all - torch.diff(ends_of_all, prepend=ends_of_all.new_zeros(self._size, 1))
        ).tolist()
        return starts

    def _reserve(self, num_bytes: int) -> None:
        """Grow the buffers to the size that the largest sender needs; all ranks take the same decision."""
        if self._buffer is not None and len(self._buffer) >= num_bytes:
            return
        symmetric = symmetric_memory()
        self._buffer = symmetric.empty(max(4096, int(num_bytes * _GROWTH)), dtype=torch.uint8, device=self._device)
        memory = symmetric.rendezvous(self._buffer, self._group)
        self._peers = [memory.get_buffer(r, self._buffer.shape, torch.uint8) for r in range(self._size)]


def _host_like(tensor: torch.Tensor) -> torch.Tensor:
    return pinned_like(tensor) if tensor.is_cuda else tensor


def _from_host(tensor: torch.Tensor, host: torch.Tensor) -> None:
    if tensor is not host:
        tensor.copy_(host, non_blocking=True)


_NUM_BUFFERS = 2
_INT64 = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class AllToAllPayload:
    """Payload of one all-to-all: elements of one dtype, of any number of tables, and the counts to receive."""

    send: NDArray[np.int64]
    """Number of elements for each rank."""
    receive: NDArray[np.int64]
    """Number of elements from each rank."""
    like: torch.Tensor
    """Tensor with the dtype and device of the elements."""
    write: Callable[[torch.Tensor], None] | None = None
    """Function that writes all elements to send, in order of target rank, to a buffer of the transport."""
    ready: torch.Tensor | None = None
    """All elements to send in order of target rank, if they already exist as one tensor; replaces `write`."""

    def to_tensor(self) -> torch.Tensor:
        """Return all elements to send as one tensor."""
        if self.ready is not None:
            return self.ready
        out = self.like.new_empty(int(self.send.sum()))
        self.write_to(out)
        return out

    def write_to(self, out: torch.Tensor) -> None:
        """Write all elements to send to `out`."""
        if self.ready is not None:
            out.copy_(self.ready)
        elif self.write is not None:
            self.write(out)


class SharedMemoryTransport(CollectiveTransport):
    """All-to-all of host tensors through shared memory; the other collectives are those of the process group."""

    def __init__(self, group: dist.ProcessGroup, buffers: Sequence["SharedBuffer"], peers: dict[int, "Peer"]) -> None:
        super().__init__(group)
        self._rank = group.rank()
        self._next_buffer = 0
        self._buffers = buffers
        self._peers = peers

    @staticmethod
    def create(group: dist.ProcessGroup, timeout: timedelta) -> "SharedMemoryTransport | None":
        """Connect the ranks of a group. Collective.

        Args:
            group: Process group with Gloo.
            timeout: Time without a response after which a peer counts as lost.

        Returns:
            The transport, or None if the ranks cannot access each other's memory because they are on several hosts, in
            containers, or in separate network namespaces (whose ranks are treated as ranks of separate hosts).
        """
        if not hasattr(os, "memfd_create"):
            return None
        gloo = CollectiveTransport(group)
        rank = group.rank()
        ranks = group.size()
        buffers = [SharedBuffer.new() for _ in range(_NUM_BUFFERS)]
        name = secrets.randbits(62)
        with _create_socket(timeout) as listener:
            listener.bind(address(name))
            listener.listen(ranks)
            names = [int(n) for n in gloo.all_gather(torch.tensor([name]))]
            lower = [connect(other, timeout) for other in names[:rank]]
            connected = [connection for connection in lower if connection is not None]
            missing = torch.tensor([rank - len(connected)])
            gloo.all_reduce(missing)
            if int(missing):
                for connection in connected:
                    connection.close()
                return None
            return SharedMemoryTransport(group, buffers, _connect_peers(listener, connected, buffers, rank, ranks))

    def all_to_all(self, into: torch.Tensor, sent: torch.Tensor, receive: Sizes, send: Sizes) -> None:
        parts = self.exchange(AllToAllPayload(np.array(send), np.array(receive), sent, ready=sent))
        for target, part in zip(into.split(list(receive)), parts, strict=True):
            target.copy_(part)

    def exchange(self, payload: AllToAllPayload) -> list[torch.Tensor]:
        """Exchange a payload; return views of the peers' buffers, valid until the next exchange."""
        with self._shut_down_on_error():
            own = self._send(payload)
            return self._receive(payload, own)

    @contextlib.contextmanager
    def _shut_down_on_error(self) -> Iterator[None]:
        """Close all connections if a peer is lost, so that the other peers fail at once and not after the timeout."""
        try:
            yield
        except RuntimeError:
            for peer in self._peers.values():
                peer.shut_down()
            raise

    def _send(self, payload: AllToAllPayload) -> torch.Tensor:
        """Write the payload to a shared buffer and send the offsets to the peers; return the part for this rank."""
        size = payload.like.element_size()
        ends = np.cumsum(payload.send)
        starts = ends - payload.send
        buffer = self._buffers[self._next_buffer]
        buffer.reserve(int(ends[-1]) * size)
        payload.write_to(buffer.elements(0, int(ends[-1]), payload.like))
        for rank, peer in self._peers.items():
            peer.send_offset(int(starts[rank]) * size)
        return buffer.elements(int(starts[self._rank]) * size, int(payload.send[self._rank]), payload.like)

    def _receive(self, payload: AllToAllPayload, own: torch.Tensor) -> list[torch.Tensor]:
        buffer_index, self._next_buffer = self._next_buffer, (self._next_buffer + 1) % _NUM_BUFFERS
        counts = payload.receive.tolist()
        received = {self._rank: own}
        for rank, peer in self._peers.items():
            received[rank] = peer.buffers[buffer_index].elements(peer.receive_offset(), counts[rank], payload.like)
        return [received[rank] for rank in range(len(counts))]


class SharedBuffer:
    """Memory that other processes can map."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._bytes = torch.empty(0, dtype=torch.uint8)
        weakref.finalize(self, os.close, file)

    @staticmethod
    def new() -> "SharedBuffer":
        """Create an empty buffer."""
        return SharedBuffer(os.memfd_create("nestrec-outbox", os.MFD_CLOEXEC))

    def reserve(self, num_bytes: int) -> None:
        """Grow the buffer to at least `num_bytes`; its content is lost."""
        if num_bytes > len(self._bytes):
            # Allocate all pages now: if memory runs out, this raises an error here instead of SIGBUS at first access.
            os.posix_fallocate(self.file, 0, int(num_bytes * _GROWTH))
            self._map()

    def elements(self, start: int, count: int, like: torch.Tensor) -> torch.Tensor:
        """Return a view of `count` elements with the dtype of `like`, from the byte offset `start`."""
        end = start + count * like.element_size()
        if end > len(self._bytes):
            self._map()
        return self._bytes[start:end].view(like.dtype)

    def _map(self) -> None:
        self._bytes = torch.frombuffer(mmap.mmap(self.file, os.fstat(self.file).st_size), dtype=torch.uint8)


class Peer:
    """Another rank: the connection to it, and its shared buffers."""

    def __init__(self, connection: socket.socket, buffers: Sequence[SharedBuffer]) -> None:
        self._socket = connection
        self.buffers = buffers
        weakref.finalize(self, connection.close)

    def send_offset(self, start: int) -> None:
        """Send the byte offset of the peer's part in this rank's buffer."""
        try:
            self._socket.send(_INT64.pack(start))
        except OSError as error:
            raise _peer_error(error) from error

    def receive_offset(self) -> int:
        """Wait for the byte offset of this rank's part in the peer's buffer."""
        try:
            message = self._socket.recv(_INT64.size)
        except OSError as error:
            raise _peer_error(error) from error
        if not message:
            raise RuntimeError("the process of a peer has exited")
        return int(_INT64.unpack(message)[0])

    def shut_down(self) -> None:
        """Shut down the connection; do nothing if it is closed."""
        with contextlib.suppress(OSError):  # the peer may have closed it
            self._socket.shutdown(socket.SHUT_RDWR)


def _peer_error(error: OSError) -> RuntimeError:
    return RuntimeError("no response in time" if isinstance(error, TimeoutError) else f"connection lost: {error}")


def _create_socket(timeout: timedelta) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(timeout.total_seconds())
    return connection


def address(name: int) -> bytes:
    """Return the socket address of a name in the abstract namespace, which creates no file."""
    return b"\0nestrec-" + _INT64.pack(name)


def connect(name: int, timeout: timedelta) -> socket.socket | None:
    """Connect to the rank that listens under a name; return None if it is not reachable from this process."""
    connection = _create_socket(timeout)
    try:
        connection.connect(address(name))
    except OSError:
        connection.close()
        return None
    return connection


def _connect_peers(
    listener: socket.socket, lower: Sequence[socket.socket], buffers: Sequence[SharedBuffer], rank: int, ranks: int
) -> dict[int, Peer]:
    """Exchange the buffers with all peers and return the peers in order of rank.

    This rank has already connected to the lower ranks; the higher ranks connect to its listener.
    """
    higher = [listener.accept()[0] for _ in range(rank + 1, ranks)]
    for connection in (*lower, *higher):
        connection.settimeout(listener.gettimeout())
        socket.send_fds(connection, [_INT64.pack(rank)], [box.file for box in buffers])
    peers = {}
    for connection in (*lower, *higher):
        message, files, _, _ = socket.recv_fds(connection, _INT64.size, _NUM_BUFFERS)
        peers[int(_INT64.unpack(message)[0])] = Peer(connection, [SharedBuffer(file) for file in files])
    return dict(sorted(peers.items()))
