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
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import accumulate

import torch
import torch.distributed as dist

from nestrec.distributed.transports import Collectives, Parcel, Sizes, row_bytes

_SPARE = 1.25
_ALIGNMENT_BYTES = 64
_TURNS = 2
_NUMBER = struct.Struct("<q")


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
        self.deliver([Parcel(sent, send, receive)], [into])

    def deliver(self, parcels: Sequence[Parcel], into: Sequence[torch.Tensor]) -> None:
        """All parcels in one exchange; what comes is put where it is wanted."""
        with self._all_or_nobody():
            self._send(parcels)
        for parcel, all_of_it in zip(parcels, into, strict=True):
            start, stop = _part_of(parcel.send_counts, self._rank)
            if stop > start:
                parcel.write(start, stop, _rows_of(all_of_it, parcel, self._rank))
        with self._all_or_nobody():
            received = self._receive(parcels)
        for rank, pieces in received.items():
            for parcel, piece, all_of_it in zip(parcels, pieces, into, strict=True):
                if len(piece):
                    _rows_of(all_of_it, parcel, rank).copy_(piece)

    def borrow(self, parcels: Sequence[Parcel]) -> list[list[torch.Tensor]]:
        """All parcels in one exchange: [parcel][source] rows, where they lie. Valid until the next exchange."""
        with self._all_or_nobody():
            self._send(parcels)
            received = self._receive(parcels)
        mine = [p.rows[slice(*_part_of(p.send_counts, self._rank))] for p in parcels if p.places is None]
        pieces = sorted((received | {self._rank: mine}).items())
        return [[of_rank[number] for _, of_rank in pieces] for number in range(len(parcels))]

    @contextlib.contextmanager
    def _all_or_nobody(self) -> Iterator[None]:
        """A rank that has lost a peer hangs up on the others: they shall not wait for it until their time is over."""
        try:
            yield
        except RuntimeError:
            for peer in self._peers.values():
                peer.hang_up()
            raise

    def _send(self, parcels: Sequence[Parcel]) -> None:
        sizes = [_size(p, p.send_counts[rank]) for rank in self._peers for p in parcels]
        starts = list(accumulate(sizes, initial=0))
        outbox = self._outboxes[self._turn]
        outbox.reserve(starts[-1])
        places = iter(starts)
        for rank, peer in self._peers.items():
            where = [(parcel, next(places)) for parcel in parcels]
            for parcel, place in where:
                start, stop = _part_of(parcel.send_counts, rank)
                if stop > start:
                    parcel.write(start, stop, outbox.rows(place, stop - start, parcel.rows))
            peer.tell(where[0][1])

    def _receive(self, parcels: Sequence[Parcel]) -> dict[int, list[torch.Tensor]]:
        """Rank to its rows for each parcel."""
        turn, self._turn = self._turn, (self._turn + 1) % _TURNS
        found: dict[int, list[torch.Tensor]] = {}
        for rank, peer in self._peers.items():
            place, outbox = peer.hear(), peer.outboxes[turn]
            found[rank] = []
            for parcel in parcels:
                count = parcel.receive_counts[rank]
                found[rank].append(outbox.rows(place, count, parcel.rows))
                place += _size(parcel, count)
        return found


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

    def rows(self, place: int, count: int, like: torch.Tensor) -> torch.Tensor:
        """Some rows of a given kind that begin at a place."""
        end = place + count * row_bytes(like)
        if end > len(self._bytes):
            self._map()
        return self._bytes[place:end].view(like.dtype).view(count, *like.shape[1:])

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


def _size(parcel: Parcel, count: int) -> int:
    """Bytes that some rows of a parcel take in an outbox."""
    return -(-count * parcel.row_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _part_of(counts: Sequence[int], rank: int) -> tuple[int, int]:
    start = sum(counts[:rank])
    return start, start + counts[rank]


def _rows_of(received: torch.Tensor, parcel: Parcel, rank: int) -> torch.Tensor:
    return received[slice(*_part_of(parcel.receive_counts, rank))]


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
