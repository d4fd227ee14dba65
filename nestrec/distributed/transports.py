"""How the bytes of an exchange get from device to device; one interface, several ways.

collectives    torch.distributed: NCCL between GPUs, Gloo between hosts
host           device to pinned host memory, Gloo, host to device: any network, several ranks on one device, and no part
               of a GPU but its copy engines
copy_engine    peer copies between devices of one NVLink domain, out of symmetric memory that every peer has mapped
shared_memory  the same between processes on the CPUs of one host (nestrec.distributed.shared_memory)

With all but NCCL the calling thread waits for the exchange: the pipeline has a lane for it.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

_SPARE = 1.25


Sizes = Sequence[int]


class Transport(Protocol):
    """Moves tensors between the ranks of one process group."""

    def all_to_all(self, into: torch.Tensor, sent: torch.Tensor, receive: Sizes, send: Sizes) -> None:
        """Bytes: `send[r]` of `sent` go to rank r, `receive[r]` of `into` come from it."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over ranks, in place."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> None: ...

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, of one shape."""
        ...


class Collectives:
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


class DeviceStaged(Collectives):
    """The collectives of a device for tensors of the host, which reach it through pinned memory: keys beside vectors.

    On a stream of its own, so that who waits for keys waits for nothing else. A tensor of the device goes as it is.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self._device, self._stream = device, torch.cuda.Stream(device, priority=-1)

    def all_to_all(self, into: torch.Tensor, sent: torch.Tensor, receive: Sizes, send: Sizes) -> None:
        if into.is_cuda:
            super().all_to_all(into, sent, receive, send)
            return
        with torch.cuda.stream(self._stream):
            came = torch.empty_like(into, device=self._device)
            super().all_to_all(came, self._there(sent), receive, send)
            into.copy_(self._back(came))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        if tensor.is_cuda:
            super().all_reduce(tensor)
            return
        with torch.cuda.stream(self._stream):
            total = self._there(tensor)
            super().all_reduce(total)
            tensor.copy_(self._back(total))

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        if tensor.is_cuda:
            super().broadcast(tensor, source)
            return
        with torch.cuda.stream(self._stream):
            value = self._there(tensor)
            super().broadcast(value, source)
            tensor.copy_(self._back(value))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if tensor.is_cuda:
            return super().all_gather(tensor)
        with torch.cuda.stream(self._stream):
            return list(self._back(torch.stack(super().all_gather(self._there(tensor)))))

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def _back(self, tensor: torch.Tensor) -> torch.Tensor:
        """In host memory, when it is there; only this stream is waited for."""
        host = _host_like(tensor).copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(self._stream)
        arrived.synchronize()
        return host


class HostStaged:
    """Gloo between pinned copies in host memory. A tensor of the host goes as it is."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._inner = Collectives(group)

    def all_to_all(self, into: torch.Tensor, sent: torch.Tensor, receive: Sizes, send: Sizes) -> None:
        received = _host_like(into)
        self._inner.all_to_all(received, _to_host(sent), receive, send)
        _from_host(into, received)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        total = _to_host(tensor)
        self._inner.all_reduce(total)
        _from_host(tensor, total)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        value = _to_host(tensor)
        self._inner.broadcast(value, source)
        _from_host(tensor, value)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [part.to(tensor.device) for part in self._inner.all_gather(_to_host(tensor))]


class CopyEngine(HostStaged):
    """Each rank puts what it sends into symmetric memory, and copies what it receives out of that of its peers.

    Where things lie, and when, is told between hosts: no kernel waits on the device. What is not an all-to-all goes
    over the host.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self._group, self._device = group, device
        self._rank, self._size = group.rank(), group.size()
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
        from torch.distributed import _symmetric_memory as symmetric

        self._buffer = symmetric.empty(max(4096, int(num_bytes * _SPARE)), dtype=torch.uint8, device=self._device)
        memory = symmetric.rendezvous(self._buffer, self._group)
        self._peers = [memory.get_buffer(r, self._buffer.shape, torch.uint8) for r in range(self._size)]


def _host_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) if tensor.is_cuda else tensor


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    host = _host_like(tensor).copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host


def _from_host(tensor: torch.Tensor, host: torch.Tensor) -> None:
    if tensor is not host:
        tensor.copy_(host, non_blocking=True)
