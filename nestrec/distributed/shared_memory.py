"""Exchanges between ranks of one host through memory that they share: what is sent passes no socket.

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

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from nestrec.distributed.transports import Collectives, Sizes

_SPARE = 1.25
_TURNS = 2
_NUMBER = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class Shipment:
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


class SharedMemory(Collectives):
    """The collectives of the group, but all-to-all through outboxes. Tensors of the host only."""

    def __init__(self, group: dist.ProcessGroup, outboxes: Sequence["Outbox"], peers: dict[int, "Peer"]) -> None:
        super().__init__(group)
        self._rank, self._turn = group.rank(), 0
        self._outboxes, self._peers = outboxes, peers

    @staticmethod
    def between(group: dist.ProcessGroup, timeout: timedelta) -> "SharedMemory | None":
        """None where ranks of the group cannot reach each other's memory: on several hosts, in containers. Collective.

        Ranks in network namespaces of their own count as hosts of their own: whoever made their links means them.
        timeout: after this long without an answer a peer counts as lost.
        """
        if not hasattr(os, "memfd_create"):
            return None
        gloo, rank, ranks = Collectives(group), group.rank(), group.size()
        outboxes = [Outbox.new() for _ in range(_TURNS)]
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
            return SharedMemory(group, outboxes, _introduce(listener, reached, outboxes, rank, ranks))

    def all_to_all(self, into: torch.Tensor, sent: torch.Tensor, receive: Sizes, send: Sizes) -> None:
        pieces = self.exchange(Shipment(np.array(send), np.array(receive), sent, ready=sent))
        for place, piece in zip(into.split(list(receive)), pieces, strict=True):
            place.copy_(piece)

    def exchange(self, shipment: Shipment) -> list[torch.Tensor]:
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

    def _send(self, shipment: Shipment) -> torch.Tensor:
        """Lay out all that is sent and tell the peers where theirs begins; this rank's own part of it."""
        size = shipment.like.element_size()
        ends = np.cumsum(shipment.send)
        starts, outbox = ends - shipment.send, self._outboxes[self._turn]
        outbox.reserve(int(ends[-1]) * size)
        shipment.write_to(outbox.elements(0, int(ends[-1]), shipment.like))
        for rank, peer in self._peers.items():
            peer.tell(int(starts[rank]) * size)
        return outbox.elements(int(starts[self._rank]) * size, int(shipment.send[self._rank]), shipment.like)

    def _receive(self, shipment: Shipment, own: torch.Tensor) -> list[torch.Tensor]:
        turn, self._turn = self._turn, (self._turn + 1) % _TURNS
        counts = shipment.receive.tolist()
        found = {self._rank: own}
        for rank, peer in self._peers.items():
            found[rank] = peer.outboxes[turn].elements(peer.hear(), counts[rank], shipment.like)
        return [found[rank] for rank in range(len(counts))]


class Outbox:
    """Memory that other processes can map."""

    def __init__(self, file: int) -> None:
        self.file, self._bytes = file, torch.empty(0, dtype=torch.uint8)
        weakref.finalize(self, os.close, file)

    @staticmethod
    def new() -> "Outbox":
        """An empty one."""
        return Outbox(os.memfd_create("nestrec-outbox", os.MFD_CLOEXEC))

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

    def __init__(self, line: socket.socket, outboxes: Sequence[Outbox]) -> None:
        self._line, self.outboxes = line, outboxes
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
    listener: socket.socket, lower: Sequence[socket.socket], outboxes: Sequence[Outbox], rank: int, ranks: int
) -> dict[int, Peer]:
    """Peers in order of rank. The lower ranks have been called; the higher ones have called this one."""
    higher = [listener.accept()[0] for _ in range(rank + 1, ranks)]
    for line in (*lower, *higher):
        line.settimeout(listener.gettimeout())
        socket.send_fds(line, [_NUMBER.pack(rank)], [box.file for box in outboxes])
    peers = {}
    for line in (*lower, *higher):
        message, files, _, _ = socket.recv_fds(line, _NUMBER.size, _TURNS)
        peers[int(_NUMBER.unpack(message)[0])] = Peer(line, [Outbox(file) for file in files])
    return dict(sorted(peers.items()))
