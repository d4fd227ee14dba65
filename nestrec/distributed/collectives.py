"""Collectives over an explicit communicator. A lost peer becomes a PeerLostError on every rank that notices it.

Data crosses as bytes, so that every type takes the same path on every backend. With one rank nothing is sent or copied.

Dense gradients are summed in fixed buckets, from the last parameters to the first. Buckets are a function of the
parameters' order, sizes and types alone, so the order of additions is the same in every step and in a resumed run, and
whether sums begin inside the backward pass or after it (docs/decisions/dense-sync.md says why this is not
DistributedDataParallel).
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nestrec.base.cuda import used_here
from nestrec.base.errors import PeerLostError, UserError
from nestrec.distributed.topology import Communicator
from nestrec.distributed.transports import AllToAllPayload, as_bytes

DEFAULT_BUCKET_BYTES = 25 << 20


@contextlib.contextmanager
def peers_watched(communicator: Communicator, operation: str) -> Iterator[None]:
    """Record a collective and what the host spends in it, and name what its failure means."""
    communicator.log.record(communicator.name, operation)
    start_ns = time.perf_counter_ns()
    with losses_named(communicator, operation):
        yield
        communicator.log.record_duration(communicator.name, time.perf_counter_ns() - start_ns)


@contextlib.contextmanager
def losses_named(communicator: Communicator, operation: str) -> Iterator[None]:
    """`peers_watched` for what another library launches on a thread of its own choice: no part of what is recorded."""
    watch = communicator.watch
    try:
        with contextlib.nullcontext() if watch is None else watch.launching(f"{communicator.name}.{operation}"):
            yield
    except torch.OutOfMemoryError:
        raise  # of this rank's own device: who starts it again would see the same
    except (RuntimeError, dist.DistError) as error:
        problem = f"a peer was lost in {communicator.name}.{operation}: {str(error).splitlines()[0]}"
        raise PeerLostError(problem, remedy="restart all ranks from the last checkpoint") from error


def all_to_all_rows(
    communicator: Communicator, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
) -> torch.Tensor:
    """Send `send_counts[r]` rows of (n, ...) to each rank r, in order; the rows received, in order of source rank."""
    if communicator.transport is None:
        return rows
    received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
    size = rows.element_size() * math.prod(rows.shape[1:])
    sent, into = as_bytes(rows.contiguous()), as_bytes(received)
    sizes = [n * size for n in receive_counts], [n * size for n in send_counts]
    with peers_watched(communicator, "all_to_all"):
        communicator.transport.all_to_all(into, sent, *sizes)
    return received


def exchange(communicator: Communicator, shipment: AllToAllPayload) -> list[torch.Tensor]:
    """Returns what the other ranks sent, in order of source rank: as one piece, or one piece per source.

    Pieces may lie in memory that is used again: they are valid until the next exchange.
    """
    if communicator.transport is None:
        return [shipment.sent()]
    with peers_watched(communicator, "all_to_all"):
        return communicator.transport.exchange(shipment)


def gather_rows_from_all(
    communicator: Communicator, rows: torch.Tensor, counts: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    """The (n, ...) rows of all ranks, in rank order, where every rank knows how many each has."""
    if communicator.transport is None:
        return (rows,)
    sends = [0 if r == communicator.rank else len(rows) for r in range(communicator.size)]
    comes = [0 if r == communicator.rank else n for r, n in enumerate(counts)]
    copies = rows.repeat(communicator.size - 1, *[1] * (rows.dim() - 1))
    received = list(all_to_all_rows(communicator, copies, sends, comes).split(comes))
    received[communicator.rank] = rows
    return tuple(received)


def all_to_all_fixed(communicator: Communicator, rows: torch.Tensor) -> torch.Tensor:
    """Row r of (size, ...) goes to rank r; row r of the result came from rank r."""
    if communicator.transport is None:
        return rows
    received = torch.empty_like(rows)
    sent, into = as_bytes(rows.contiguous()), as_bytes(received)
    sizes = [len(into) // communicator.size] * communicator.size
    with peers_watched(communicator, "all_to_all"):
        communicator.transport.all_to_all(into, sent, sizes, sizes)
    return received


def all_reduce_sum(communicator: Communicator, tensor: torch.Tensor) -> None:
    """Sum over ranks, in place."""
    if communicator.transport is None:
        return
    with peers_watched(communicator, "all_reduce"):
        communicator.transport.all_reduce(tensor)


def broadcast(communicator: Communicator, tensor: torch.Tensor, source: int = 0) -> None:
    """The tensor of one rank of the communicator, on every rank, in place."""
    if communicator.transport is None:
        return
    with peers_watched(communicator, "broadcast"):
        communicator.transport.broadcast(tensor, source)


def all_gather_equal(communicator: Communicator, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks, in rank order; the shape is the same on every rank."""
    if communicator.transport is None:
        return [tensor]
    with peers_watched(communicator, "all_gather"):
        return communicator.transport.all_gather(tensor)


def all_gather_rows(
    communicator: Communicator, counts_over: Communicator, rows: torch.Tensor
) -> tuple[torch.Tensor, list[int]]:
    """The (n, ...) rows of all ranks, in rank order, and how many came from each; n may differ.

    counts_over: communicator of the same ranks that carries host tensors.
    """
    if communicator.transport is None:
        return rows, [len(rows)]
    counts = [int(n) for n in all_gather_equal(counts_over, torch.tensor([len(rows)]))]
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: len(rows)] = rows
    gathered = all_gather_equal(communicator, padded)
    return torch.cat([part[:n] for part, n in zip(gathered, counts, strict=True)]), counts


def barrier(communicator: Communicator) -> None:
    if communicator.group is not None:
        all_reduce_sum(communicator, torch.zeros(1))


def all_gather_json(communicator: Communicator, value: Any) -> list[Any]:
    """Small JSON-like values of all ranks, in rank order; JSON and not pickle, so that a peer can send only data."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode() or b" "), dtype=torch.uint8)
    if communicator.transport is None:
        return [json.loads(bytes(text.tolist()))]
    lengths = [int(n) for n in all_gather_equal(communicator, torch.tensor([len(text)]))]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(text)] = text
    gathered = all_gather_equal(communicator, padded)
    return [json.loads(bytes(part[:n].tolist())) for part, n in zip(gathered, lengths, strict=True)]


def broadcast_json(communicator: Communicator, value: Any, source: int = 0) -> Any:
    """The value of one rank, on every rank."""
    return all_gather_json(communicator, value if communicator.rank == source else None)[source]


def agree(communicator: Communicator, what: str, value: Any) -> None:
    """Raise the same UserError on every rank unless all ranks hold the same small value."""
    values = all_gather_json(communicator, value)
    for rank, other in enumerate(values):
        if other != values[0]:
            name, mine, theirs = _first_difference(what, values[0], other)
            remedy = "start every rank with the same configuration and version"
            raise UserError(f"rank {rank} differs from rank 0 ({theirs!r})", option=name, value=mine, remedy=remedy)


def _first_difference(name: str, mine: Any, theirs: Any) -> tuple[str, Any, Any]:
    """Where two JSON-like values differ, as deep as both have the same parts: its name and both values."""
    inner: list[tuple[str, Any, Any]] = []
    if isinstance(mine, dict) and isinstance(theirs, dict) and mine.keys() == theirs.keys():
        inner = [(f"{name}.{key}", value, theirs[key]) for key, value in mine.items()]
    elif isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        inner = [(f"{name}[{i}]", *pair) for i, pair in enumerate(zip(mine, theirs, strict=True))]
    differing = [part for part in inner if part[1] != part[2]]
    return _first_difference(*differing[0]) if differing else (name, mine, theirs)


def raise_together(communicator: Communicator, error: UserError | None) -> None:
    """Raise on every rank if any rank has an error: the error of the first such rank, named by its rank."""
    mine = None if error is None else [error.problem, error.option, _sendable(error.value), error.remedy]
    for rank, found in enumerate(all_gather_json(communicator, mine)):
        if found is not None:
            problem, field, value, remedy = found
            raise UserError(f"{problem} (rank {rank})", option=field, value=value, remedy=remedy)


def _sendable(value: Any) -> Any:
    """A value as JSON carries it, so that it is printed as where it was found; in words where JSON cannot."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return str(value)
    return value


Sum = Callable[[], None]
"""A collective that sums one bucket of gradients."""


class GradientReducer:
    """Sums the gradients of some parameters over all ranks of a communicator, in place."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        communicator: Communicator,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        *,
        begins_early: bool = False,
    ) -> None:
        """begins_early: `early_sums` may be used."""
        self._communicator = communicator
        self._all = list(parameters)
        self._parameters = [p for p in self._all if p.requires_grad]
        self._buckets = _buckets(self._parameters, bucket_bytes) if communicator.group is not None else []
        self._next = 0  # bucket of this step whose sum is issued next
        self._submit: Callable[[Sum], None] | None = None
        self._awaited: list[set[int]] = []
        self.begins_early = begins_early and len(self._buckets) > 1
        """Whether there are buckets whose sums can begin inside the backward pass: all but the last one, which holds
        the parameters that the backward pass comes to at its end."""
        if self.begins_early:
            self._bucket_of = {id(p): number for number, bucket in enumerate(self._buckets) for p in bucket}
            for parameter in self._parameters:
                parameter.register_post_accumulate_grad_hook(self._has_come)
        self.bytes_reduced = 0
        """Bytes of gradients given to all-reduce so far."""

    @contextlib.contextmanager
    def early_sums(self, submit: Callable[[Sum], None]) -> Iterator[None]:
        """Around the backward pass that completes the gradients of a step: `submit` is given the sums of all buckets
        but the last one, each as soon as its gradients are there and the sum before it is submitted.

        They are always the same sums in the same order, also where a rank has no sample and so no backward pass. They
        must have run before `reduce`, which issues the rest.
        """
        self._submit = submit
        self._awaited = [{id(p) for p in bucket} for bucket in self._buckets]
        try:
            yield
        finally:
            self._submit = None
        while self._next < len(self._buckets) - 1:
            self._begin_next(submit)

    def _has_come(self, parameter: torch.Tensor) -> None:
        """The gradient of a parameter has been added up by a backward pass."""
        if self._submit is None:
            return
        bucket = self._bucket_of[id(parameter)]
        if bucket < self._next:
            raise UserError(
                "the gradient of a weight came in two parts within one backward pass, its sum over ranks had begun",
                option="ranks.dense_overlap",
                value=True,
                remedy="set it to false for this model",
            )
        self._awaited[bucket].discard(id(parameter))
        while self._next < len(self._buckets) - 1 and not self._awaited[self._next]:
            self._begin_next(self._submit)

    def _begin_next(self, submit: Callable[[Sum], None]) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        submit(lambda: self._sum(bucket))

    def reduce(self, beside: torch.Tensor | None = None) -> None:
        """`p.grad` becomes its sum over ranks; a gradient that is missing (a rank without samples) counts as zero.

        beside: figures that are summed after the gradients, in place. Collective. Losses are sums over a rank's samples
        divided by the global weight, so sums need no division.
        """
        for bucket in self._buckets[self._next :]:
            self._sum(bucket)
        self._next = 0
        if beside is not None:
            all_reduce_sum(self._communicator, beside)

    def _sum(self, bucket: Sequence[torch.nn.Parameter]) -> None:
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in bucket]
        used_here(grads)
        flat = torch.cat([g.reshape(-1) for g in grads])
        all_reduce_sum(self._communicator, flat)
        self.bytes_reduced += flat.numel() * flat.element_size()
        for parameter, total in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            parameter.grad = total.view_as(parameter)

    def broadcast_parameters(self, buffers: Iterable[torch.Tensor] = (), source: int = 0) -> None:
        """Every rank takes the parameters of one rank, those that are frozen too, and these buffers. Collective."""
        with torch.no_grad():
            for tensor in (*self._all, *buffers):
                whole = tensor.detach().contiguous()  # a view of it where it is that already
                broadcast(self._communicator, whole, source)
                tensor.copy_(whole)


def _buckets(parameters: Sequence[torch.nn.Parameter], bucket_bytes: int) -> list[list[torch.nn.Parameter]]:
    """Runs of parameters of one type and device, from the last to the first, as a backward pass comes to them; each is
    closed once it holds `bucket_bytes`."""
    buckets: list[list[torch.nn.Parameter]] = []
    size = 0
    for parameter in reversed(parameters):
        fits = buckets and size < bucket_bytes and _kind(buckets[-1][0]) == _kind(parameter)
        if not fits:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return buckets


def _kind(parameter: torch.nn.Parameter) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device
