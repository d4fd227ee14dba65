"""How the bytes of an exchange get from device to device; one interface, several ways.

collectives    torch.distributed: NCCL between GPUs, Gloo between hosts
host           device to pinned host memory, Gloo, host to device: any network, several ranks on one device, and no part
               of a GPU but its copy engines
copy_engine    peer copies between devices of one NVLink domain, out of symmetric memory that every peer has mapped
shared_memory  the same between processes on the CPUs of one host (nestrec.distributed.shared_memory)

With all but NCCL the calling thread waits for the exchange: the pipeline has a lane for it.

Exchanges between ranks of one host through memory that they share: what is sent passes no socket.

A rank lays out what it sends in an outbox, tells each peer where, and takes what is for it out of the outboxes of the
others. There are two outboxes, used by turns: whoever has told me of its next exchange has done with my last one, so an
outbox is free again when its turn comes. All that is not an all-to-all goes through Gloo.

Outboxes are anonymous files and peers talk through sockets without a file: nothing is left behind by a rank that is
killed, and its peers notice at once.
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
from nestrec.base.cuda import on_stream, pinned_like, sent_to_device, side_stream, to_host

_SPARE = 1.25


Sizes = Sequence[int]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of a contiguous tensor as bytes."""
    if tensor.numel() == 0:
        return tensor.new_empty(0, dtype=torch.uint8)
    return tensor.view(-1).view(torch.uint8)


class Transport(Protocol):
    """Moves tensors between the ranks of one process group."""

    def all_to_all(self, into: torch.Tensor, sent: torch.Tensor, receive: Sizes, send: Sizes) -> None:
        """Bytes: `send[r]` of `sent` go to rank r, `receive[r]` of `into` come from it."""
        ...

    def exchange(self, shipment: "AllToAllPayload") -> list[torch.Tensor]:
        """Returns the elements that arrive, in order of source rank: as one piece, or one piece per source.

        Pieces may lie in memory that is used again: they are valid until the next exchange.
        """
        like = shipment.like
        size = like.element_size()
        received = like.new_empty(int(shipment.receive.sum()))
        receive = (shipment.receive * size).tolist()
        send = (shipment.send * size).tolist()
        self.all_to_all(as_bytes(received), as_bytes(shipment.sent()), receive, send)
        return [received]

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over ranks, in place."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> None: ...

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, of one shape."""
        ...


class CollectiveTransport(Transport):
    """The collectives of the group's own backend."""

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
    """The collectives of a device for tensors of the host, which reach it through pinned memory: keys beside vectors.

    On a stream of its own, so that who waits for keys waits for nothing else. A tensor of the device goes as it is.
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
            came = torch.empty_like(into, device=self._device)
            super().all_to_all(came, self._there(sent), receive, send)
            into.copy_(self._back(came))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        if tensor.is_cuda:
            super().all_reduce(tensor)
            return
        with on_stream(self._stream):
            total = self._there(tensor)
            super().all_reduce(total)
            tensor.copy_(self._back(total))

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        if tensor.is_cuda:
            super().broadcast(tensor, source)
            return
        with on_stream(self._stream):
            value = self._there(tensor)
            super().broadcast(value, source)
            tensor.copy_(self._back(value))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if tensor.is_cuda:
            return super().all_gather(tensor)
        with on_stream(self._stream):
            return list(self._back(torch.stack(super().all_gather(self._there(tensor)))))

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        return sent_to_device(tensor, self._device)

    def _back(self, tensor: torch.Tensor) -> torch.Tensor:
        """In host memory, when it is there; only this stream, the current one, is waited for."""
        return to_host(tensor).wait()


class HostStagedTransport(Transport):
    """Gloo between pinned copies in host memory. A tensor of the host goes as it is."""

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
    """Each rank puts what it sends into symmetric memory, and copies what it receives out of that of its peers.

    Where things lie, and when, is told between hosts: no kernel waits on the device. What is not an all-to-all goes
    over the host.
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
        self._inner.all_reduce(torch.zeros(1))  # all have laid out what they send
        at = 0
        for rank, size in enumerate(receive):
            start = starts[rank][self._rank]
            into[at : at + size].copy_(self._peers[rank][start : start + size], non_blocking=True)
            at += size
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(self._device))

    def memory_of(self, rank: int) -> torch.Tensor:
        """The bytes that a rank has laid out for its peers, as mapped here."""
        return self._peers[rank]

    def _starts_of_all(self, send: Sizes) -> list[list[int]]:
        """[source][target] where in the source's buffer the target's bytes begin. Nobody reads old bytes any more."""
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
        """Room for the largest sender; every rank comes to the same decision."""
        if self._buffer is not None and len(self._buffer) >= num_bytes:
            return
        symmetric = symmetric_memory()
        self._buffer = symmetric.empty(max(4096, int(num_bytes * _SPARE)), dtype=torch.uint8, device=self._device)
        memory = symmetric.rendezvous(self._buffer, self._group)
        self._peers = [memory.get_buffer(r, self._buffer.shape, torch.uint8) for r in range(self._size)]


def _host_like(tensor: torch.Tensor) -> torch.Tensor:
    return pinned_like(tensor) if tensor.is_cuda else tensor


def _from_host(tensor: torch.Tensor, host: torch.Tensor) -> None:
    if tensor is not host:
        tensor.copy_(host, non_blocking=True)


_TURNS = 2
_NUMBER = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class AllToAllPayload:
    """Elements that one exchange takes to other ranks, and how many come back: of any number of tables, of one type."""

    send: NDArray[np.int64]
    """Elements for each rank."""
    receive: NDArray[np.int64]
    """Elements from each rank."""
    like: torch.Tensor
    """Any tensor of their type and device."""
    write: Callable[[torch.Tensor], None] | None = None
    """Puts all that is sent, in order of target, into memory that a transport gives."""
    ready: torch.Tensor | None = None
    """All that is sent, where it lies in that order already."""

    def sent(self) -> torch.Tensor:
        """All that is sent, in memory of its own."""
        if self.ready is not None:
            return self.ready
        out = self.like.new_empty(int(self.send.sum()))
        self.write_to(out)
        return out

    def write_to(self, out: torch.Tensor) -> None:
        if self.ready is not None:
            out.copy_(self.ready)
        elif self.write is not None:
            self.write(out)


class SharedMemoryTransport(CollectiveTransport):
    """The collectives of the group, but all-to-all through outboxes. Tensors of the host only."""

    def __init__(self, group: dist.ProcessGroup, outboxes: Sequence["SharedBuffer"], peers: dict[int, "Peer"]) -> None:
        super().__init__(group)
        self._rank = group.rank()
        self._turn = 0
        self._outboxes = outboxes
        self._peers = peers

    @staticmethod
    def between(group: dist.ProcessGroup, timeout: timedelta) -> "SharedMemoryTransport | None":
        """None where ranks of the group cannot reach each other's memory: on several hosts, in containers. Collective.

        Ranks in network namespaces of their own count as hosts of their own: whoever made their links means them.
        timeout: after this long without an answer a peer counts as lost.
        """
        if not hasattr(os, "memfd_create"):
            return None
        gloo = CollectiveTransport(group)
        rank = group.rank()
        ranks = group.size()
        outboxes = [SharedBuffer.new() for _ in range(_TURNS)]
        name = secrets.randbits(62)
        with _socket(timeout) as listener:
            listener.bind(address(name))
            listener.listen(ranks)
            names = [int(n) for n in gloo.all_gather(torch.tensor([name]))]
            lower = [connect(other, timeout) for other in names[:rank]]
            reached = [line for line in lower if line is not None]
            missing = torch.tensor([rank - len(reached)])
            gloo.all_reduce(missing)
            if int(missing):
                for line in reached:
                    line.close()
                return None
            return SharedMemoryTransport(group, outboxes, _introduce(listener, reached, outboxes, rank, ranks))

    def all_to_all(self, into: torch.Tensor, sent: torch.Tensor, receive: Sizes, send: Sizes) -> None:
        pieces = self.exchange(AllToAllPayload(np.array(send), np.array(receive), sent, ready=sent))
        for place, piece in zip(into.split(list(receive)), pieces, strict=True):
            place.copy_(piece)

    def exchange(self, shipment: AllToAllPayload) -> list[torch.Tensor]:
        """What comes from each rank, where it lies. Valid until the next exchange."""
        with self._all_or_nobody():
            own = self._send(shipment)
            return self._receive(shipment, own)

    @contextlib.contextmanager
    def _all_or_nobody(self) -> Iterator[None]:
        """A rank that has lost a peer hangs up on the others: they shall not wait for it until their time is over."""
        try:
            yield
        except RuntimeError:
            for peer in self._peers.values():
                peer.hang_up()
            raise

    def _send(self, shipment: AllToAllPayload) -> torch.Tensor:
        """Lay out all that is sent and tell the peers where theirs begins; this rank's own part of it."""
        size = shipment.like.element_size()
        ends = np.cumsum(shipment.send)
        starts = ends - shipment.send
        outbox = self._outboxes[self._turn]
        outbox.reserve(int(ends[-1]) * size)
        shipment.write_to(outbox.elements(0, int(ends[-1]), shipment.like))
        for rank, peer in self._peers.items():
            peer.tell(int(starts[rank]) * size)
        return outbox.elements(int(starts[self._rank]) * size, int(shipment.send[self._rank]), shipment.like)

    def _receive(self, shipment: AllToAllPayload, own: torch.Tensor) -> list[torch.Tensor]:
        turn, self._turn = self._turn, (self._turn + 1) % _TURNS
        counts = shipment.receive.tolist()
        found = {self._rank: own}
        for rank, peer in self._peers.items():
            found[rank] = peer.outboxes[turn].elements(peer.hear(), counts[rank], shipment.like)
        return [found[rank] for rank in range(len(counts))]


class SharedBuffer:
    """Memory that other processes can map."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._bytes = torch.empty(0, dtype=torch.uint8)
        weakref.finalize(self, os.close, file)

    @staticmethod
    def new() -> "SharedBuffer":
        """An empty one."""
        return SharedBuffer(os.memfd_create("nestrec-outbox", os.MFD_CLOEXEC))

    def reserve(self, num_bytes: int) -> None:
        """Have room; what lies in it is lost."""
        if num_bytes > len(self._bytes):
            # Taken as a whole: memory that is missing is an error here, and not a signal where it is touched.
            os.posix_fallocate(self.file, 0, int(num_bytes * _SPARE))
            self._map()

    def elements(self, place: int, count: int, like: torch.Tensor) -> torch.Tensor:
        """Some elements of a given type that begin at a byte."""
        end = place + count * like.element_size()
        if end > len(self._bytes):
            self._map()
        return self._bytes[place:end].view(like.dtype)

    def _map(self) -> None:
        self._bytes = torch.frombuffer(mmap.mmap(self.file, os.fstat(self.file).st_size), dtype=torch.uint8)


class Peer:
    """Another rank: a line to it, and its outboxes."""

    def __init__(self, line: socket.socket, outboxes: Sequence[SharedBuffer]) -> None:
        self._line = line
        self.outboxes = outboxes
        weakref.finalize(self, line.close)

    def tell(self, place: int) -> None:
        """Where in this rank's outbox begins what is for the peer."""
        try:
            self._line.send(_NUMBER.pack(place))
        except OSError as error:
            raise _lost(error) from error

    def hear(self) -> int:
        """The same from the peer; waits for it."""
        try:
            message = self._line.recv(_NUMBER.size)
        except OSError as error:
            raise _lost(error) from error
        if not message:
            raise RuntimeError("the process of a peer has ended")
        return int(_NUMBER.unpack(message)[0])

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):  # it may be gone
            self._line.shutdown(socket.SHUT_RDWR)


def _lost(error: OSError) -> RuntimeError:
    return RuntimeError("no answer in time" if isinstance(error, TimeoutError) else f"connection lost: {error}")


def _socket(timeout: timedelta) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.settimeout(timeout.total_seconds())
    return line


def address(name: int) -> bytes:
    """A name that is known in this network namespace and in no folder."""
    return b"\0nestrec-" + _NUMBER.pack(name)


def connect(name: int, timeout: timedelta) -> socket.socket | None:
    """A line to the rank that listens under a name; none where nobody is heard from here."""
    line = _socket(timeout)
    try:
        line.connect(address(name))
    except OSError:
        line.close()
        return None
    return line


def _introduce(
    listener: socket.socket, lower: Sequence[socket.socket], outboxes: Sequence[SharedBuffer], rank: int, ranks: int
) -> dict[int, Peer]:
    """Peers in order of rank. The lower ranks have been called; the higher ones have called this one."""
    higher = [listener.accept()[0] for _ in range(rank + 1, ranks)]
    for line in (*lower, *higher):
        line.settimeout(listener.gettimeout())
        socket.send_fds(line, [_NUMBER.pack(rank)], [box.file for box in outboxes])
    peers = {}
    for line in (*lower, *higher):
        message, files, _, _ = socket.recv_fds(line, _NUMBER.size, _TURNS)
        peers[int(_NUMBER.unpack(message)[0])] = Peer(line, [SharedBuffer(file) for file in files])
    return dict(sorted(peers.items()))
