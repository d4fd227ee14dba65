"""Collectives over an explicit communicator: all-to-all, all-reduce, broadcast, all-gather and barrier.

A lost peer raises a PeerLostError on every rank that notices it. Tensors are sent as bytes, so that all dtypes use the
same code on every backend. With one rank nothing is sent or copied.

`GradientReducer` is the data-parallel all-reduce of dense gradients. It sums them in fixed buckets, from the last
parameters to the first. The buckets depend only on the order, sizes and dtypes of the parameters, so the order of
additions is the same in every step and in a resumed run, whether or not the sums overlap the backward pass.
docs/decisions/dense-all-reduce.md explains why this is not DistributedDataParallel (DDP).
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nestrec.base.cuda import record_stream_use
from nestrec.base.errors import PeerLostError, UserError
from nestrec.distributed.topology import Communicator
from nestrec.distributed.transports import AllToAllPayload, as_bytes

DEFAULT_BUCKET_BYTES = 25 << 20


@contextlib.contextmanager
def watch_collective(communicator: Communicator, operation: str) -> Iterator[None]:
    """Record a collective and the host time it takes; raise a PeerLostError if it fails."""
    communicator.log.record(communicator.name, operation)
    start_ns = time.perf_counter_ns()
    with name_peer_loss(communicator, operation):
        yield
        communicator.log.record_duration(communicator.name, time.perf_counter_ns() - start_ns)


@contextlib.contextmanager
def name_peer_loss(communicator: Communicator, operation: str) -> Iterator[None]:
    """Raise a PeerLostError if the collective in the block fails.

    Same as `watch_collective`, but records nothing: for collectives that another library launches on its own threads.
    """
    watchdog = communicator.watchdog
    try:
        with (
            contextlib.nullcontext() if watchdog is None else watchdog.watch_launch(f"{communicator.name}.{operation}")
        ):
            yield
    except torch.OutOfMemoryError:
        raise  # this rank's device is out of memory: no peer was lost, and a restart would fail in the same way
    except (RuntimeError, dist.DistError) as error:
        problem = f"a peer was lost in {communicator.name}.{operation}: {str(error).splitlines()[0]}"
        raise PeerLostError(problem, remedy="restart all ranks from the last checkpoint") from error


def all_to_all_rows(
    communicator: Communicator, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
) -> torch.Tensor:
    """Exchange rows with all ranks (all-to-all).

    Args:
        communicator: Ranks that exchange rows.
        rows: (n, ...) rows to send, in order of target rank.
        send_counts: Number of rows to send to each rank.
        receive_counts: Number of rows to receive from each rank.

    Returns:
        The received rows, in order of source rank.
    """
    if communicator.transport is None:
        return rows
    received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
    size = rows.element_size() * math.prod(rows.shape[1:])
    sent, into = as_bytes(rows.contiguous()), as_bytes(received)
    sizes = [n * size for n in receive_counts], [n * size for n in send_counts]
    with watch_collective(communicator, "all_to_all"):
        communicator.transport.all_to_all(into, sent, *sizes)
    return received


def all_to_all_payload(communicator: Communicator, payload: AllToAllPayload) -> list[torch.Tensor]:
    """Exchange a payload with all ranks (all-to-all).

    Returns:
        The received elements in order of source rank: one tensor, or one tensor per source. They may be views of a
        reused buffer and are valid until the next exchange.
    """
    if communicator.transport is None:
        return [payload.to_tensor()]
    with watch_collective(communicator, "all_to_all"):
        return communicator.transport.exchange(payload)


def gather_rows_from_all(
    communicator: Communicator, rows: torch.Tensor, counts: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    """Return the (n, ...) rows of each rank (all-gather); every rank knows all `counts`."""
    if communicator.transport is None:
        return (rows,)
    send_counts = [0 if r == communicator.rank else len(rows) for r in range(communicator.size)]
    receive_counts = [0 if r == communicator.rank else n for r, n in enumerate(counts)]
    copies = rows.repeat(communicator.size - 1, *[1] * (rows.dim() - 1))
    received = list(all_to_all_rows(communicator, copies, send_counts, receive_counts).split(receive_counts))
    received[communicator.rank] = rows
    return tuple(received)


def all_to_all_fixed(communicator: Communicator, rows: torch.Tensor) -> torch.Tensor:
    """Send row r of (size, ...) to rank r; row r of the result is from rank r (all-to-all with equal splits)."""
    if communicator.transport is None:
        return rows
    received = torch.empty_like(rows)
    sent, into = as_bytes(rows.contiguous()), as_bytes(received)
    sizes = [len(into) // communicator.size] * communicator.size
    with watch_collective(communicator, "all_to_all"):
        communicator.transport.all_to_all(into, sent, sizes, sizes)
    return received


def all_reduce_sum(communicator: Communicator, tensor: torch.Tensor) -> None:
    """Sum a tensor over all ranks, in place."""
    if communicator.transport is None:
        return
    with watch_collective(communicator, "all_reduce"):
        communicator.transport.all_reduce(tensor)


def broadcast(communicator: Communicator, tensor: torch.Tensor, source: int = 0) -> None:
    """Copy the tensor of the rank `source` of the communicator to every rank, in place."""
    if communicator.transport is None:
        return
    with watch_collective(communicator, "broadcast"):
        communicator.transport.broadcast(tensor, source)


def all_gather_equal(communicator: Communicator, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of all ranks in rank order; the shape must be the same on every rank."""
    if communicator.transport is None:
        return [tensor]
    with watch_collective(communicator, "all_gather"):
        return communicator.transport.all_gather(tensor)


def all_gather_rows(
    communicator: Communicator, host_communicator: Communicator, rows: torch.Tensor
) -> tuple[torch.Tensor, list[int]]:
    """Gather the (n, ...) rows of all ranks (all-gather); n may differ between ranks.

    Args:
        communicator: Ranks whose rows are gathered.
        host_communicator: Communicator of the same ranks for host tensors; it exchanges the counts.
        rows: Rows of this rank.

    Returns:
        The rows of all ranks, concatenated in rank order, and the number of rows of each rank.
    """
    if communicator.transport is None:
        return rows, [len(rows)]
    counts = [int(n) for n in all_gather_equal(host_communicator, torch.tensor([len(rows)]))]
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: len(rows)] = rows
    gathered = all_gather_equal(communicator, padded)
    return torch.cat([part[:n] for part, n in zip(gathered, counts, strict=True)]), counts


def barrier(communicator: Communicator) -> None:
    """Block until all ranks of the communicator have called it."""
    if communicator.group is not None:
        all_reduce_sum(communicator, torch.zeros(1))


def all_gather_json(communicator: Communicator, value: Any) -> list[Any]:
    """Return the small JSON-compatible values of all ranks in rank order.

    Values are encoded as JSON and not as pickle, so that a peer can send only data and no code.
    """
    text = torch.frombuffer(bytearray(json.dumps(value).encode() or b" "), dtype=torch.uint8)
    if communicator.transport is None:
        return [json.loads(bytes(text.tolist()))]
    lengths = [int(n) for n in all_gather_equal(communicator, torch.tensor([len(text)]))]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(text)] = text
    gathered = all_gather_equal(communicator, padded)
    return [json.loads(bytes(part[:n].tolist())) for part, n in zip(gathered, lengths, strict=True)]


def broadcast_json(communicator: Communicator, value: Any, source: int = 0) -> Any:
    """Return the JSON-compatible value of the rank `source` on every rank."""
    return all_gather_json(communicator, value if communicator.rank == source else None)[source]


def assert_same_on_all_ranks(communicator: Communicator, name: str, value: Any) -> None:
    """Raise the same UserError on every rank if a small JSON-compatible value differs between ranks.

    Args:
        communicator: Ranks that are compared.
        name: Name of the value for the error, for example the option.
        value: Value of this rank.
    """
    values = all_gather_json(communicator, value)
    for rank, other in enumerate(values):
        if other != values[0]:
            path, local, remote = _first_difference(name, values[0], other)
            remedy = "start every rank with the same configuration and version"
            raise UserError(f"rank {rank} differs from rank 0 ({remote!r})", option=path, value=local, remedy=remedy)


def _first_difference(name: str, local: Any, remote: Any) -> tuple[str, Any, Any]:
    """Return the path of the first difference of two JSON-compatible values, and both values at that path."""
    inner: list[tuple[str, Any, Any]] = []
    if isinstance(local, dict) and isinstance(remote, dict) and local.keys() == remote.keys():
        inner = [(f"{name}.{key}", value, remote[key]) for key, value in local.items()]
    elif isinstance(local, list) and isinstance(remote, list) and len(local) == len(remote):
        inner = [(f"{name}[{i}]", *pair) for i, pair in enumerate(zip(local, remote, strict=True))]
    differences = [item for item in inner if item[1] != item[2]]
    return _first_difference(*differences[0]) if differences else (name, local, remote)


def raise_on_all_ranks(communicator: Communicator, error: UserError | None) -> None:
    """Raise the error of the first rank that has one on all ranks; the message contains its rank. Collective."""
    local = None if error is None else [error.problem, error.option, _json_compatible(error.value), error.remedy]
    for rank, failure in enumerate(all_gather_json(communicator, local)):
        if failure is not None:
            problem, field, value, remedy = failure
            raise UserError(f"{problem} (rank {rank})", option=field, value=value, remedy=remedy)


def _json_compatible(value: Any) -> Any:
    """Return the value if JSON can encode it, so that all ranks print the same message; otherwise return its text."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return str(value)
    return value


Sum = Callable[[], None]
"""Function that runs the all-reduce of one bucket of gradients."""


class GradientReducer:
    """Bucketed all-reduce of the gradients of some parameters over the ranks of a communicator (data parallel).

    Args:
        parameters: Parameters whose gradients are summed; those without `requires_grad` are only broadcast.
        communicator: Ranks that hold the same parameters.
        bucket_bytes: Size at which a bucket is closed, in bytes.
        overlaps_backward: Whether `overlap_backward` can be used.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        communicator: Communicator,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        *,
        overlaps_backward: bool = False,
    ) -> None:
        self._communicator = communicator
        self._all_parameters = list(parameters)
        self._parameters = [p for p in self._all_parameters if p.requires_grad]
        self._buckets = _buckets(self._parameters, bucket_bytes) if communicator.group is not None else []
        self._next = 0  # index of the next bucket to reduce in this step
        self._submit: Callable[[Sum], None] | None = None
        self._missing: list[set[int]] = []
        self.overlaps_backward = overlaps_backward and len(self._buckets) > 1
        """Whether some buckets can be reduced during the backward pass.

        These are all buckets but the last one, whose gradients are complete only at the end of the backward pass.
        """
        if self.overlaps_backward:
            self._bucket_of = {id(p): number for number, bucket in enumerate(self._buckets) for p in bucket}
            for parameter in self._parameters:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)
        self.bytes_reduced = 0
        """Number of bytes of gradients passed to all-reduce so far."""

    @contextlib.contextmanager
    def overlap_backward(self, submit: Callable[[Sum], None]) -> Iterator[None]:
        """Overlap the all-reduce with the backward pass of the last micro-batch, which runs inside the block.

        Each bucket but the last one is passed to `submit` as soon as its gradients are complete and the bucket before
        it was submitted. All ranks submit the same buckets in the same order, even a rank without samples, which has no
        backward pass. The submitted functions must have run before `reduce` is called, which reduces the remaining
        buckets.
        """
        self._submit = submit
        self._missing = [{id(p) for p in bucket} for bucket in self._buckets]
        try:
            yield
        finally:
            self._submit = None
        while self._next < len(self._buckets) - 1:
            self._submit_next(submit)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Mark the gradient of a parameter as accumulated and submit the buckets that are complete."""
        if self._submit is None:
            return
        bucket = self._bucket_of[id(parameter)]
        if bucket < self._next:
            raise UserError(
                "the backward pass accumulated a gradient again after its all-reduce had started",
                option="parallel.overlap_grad_reduce",
                value=True,
                remedy="set --parallel.overlap_grad_reduce=false for this model",
            )
        self._missing[bucket].discard(id(parameter))
        while self._next < len(self._buckets) - 1 and not self._missing[self._next]:
            self._submit_next(self._submit)

    def _submit_next(self, submit: Callable[[Sum], None]) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        submit(lambda: self._sum(bucket))

    def reduce(self, extra: torch.Tensor | None = None) -> None:
        """Replace `p.grad` of each parameter by its sum over ranks. Collective.

        A missing gradient (of a rank without samples) counts as zero. The loss of a rank is the sum over its samples
        divided by the global weight, so the sums need no division.

        Args:
            extra: Tensor of metrics to sum over ranks after the gradients, in place.
        """
        for bucket in self._buckets[self._next :]:
            self._sum(bucket)
        self._next = 0
        if extra is not None:
            all_reduce_sum(self._communicator, extra)

    def _sum(self, bucket: Sequence[torch.nn.Parameter]) -> None:
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in bucket]
        record_stream_use(grads)
        flat = torch.cat([g.reshape(-1) for g in grads])
        all_reduce_sum(self._communicator, flat)
        self.bytes_reduced += flat.numel() * flat.element_size()
        for parameter, total in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            parameter.grad = total.view_as(parameter)

    def broadcast_parameters(self, buffers: Iterable[torch.Tensor] = (), source: int = 0) -> None:
        """Copy all parameters, frozen ones included, and the given buffers of one rank to every rank. Collective."""
        with torch.no_grad():
            for tensor in (*self._all_parameters, *buffers):
                contiguous = tensor.detach().contiguous()  # a view if the tensor is contiguous
                broadcast(self._communicator, contiguous, source)
                tensor.copy_(contiguous)


def _buckets(parameters: Sequence[torch.nn.Parameter], bucket_bytes: int) -> list[list[torch.nn.Parameter]]:
    """Group consecutive parameters of one dtype and device, in reverse order, as the backward pass reaches them.

    A bucket is closed when it holds at least `bucket_bytes`.
    """
    buckets: list[list[torch.nn.Parameter]] = []
    size = 0
    for parameter in reversed(parameters):
        fits = buckets and size < bucket_bytes and _dtype_and_device(buckets[-1][0]) == _dtype_and_device(parameter)
        if not fits:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return buckets


def _dtype_and_device(parameter: torch.nn.Parameter) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device
