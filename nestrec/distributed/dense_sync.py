"""Dense gradients summed over ranks, in fixed buckets in parameter order.

Buckets are a function of the parameters' order, sizes and types alone, so the order of additions is the same in every
step and in a resumed run (docs/decisions/dense-sync.md says why this is not DistributedDataParallel).
"""

from collections.abc import Iterable, Sequence

import torch

from nestrec.distributed.exchange import all_reduce_sum, broadcast
from nestrec.distributed.topology import Communicator

DEFAULT_BUCKET_BYTES = 25 << 20


class DenseSync:
    """Sums the gradients of some parameters over all ranks of a communicator, in place."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        communicator: Communicator,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        self._communicator = communicator
        self._parameters = [p for p in parameters if p.requires_grad]
        self._buckets = _buckets(self._parameters, bucket_bytes)
        self.bytes_reduced = 0
        """Bytes of gradients given to all-reduce so far."""

    def reduce(self) -> None:
        """`p.grad` becomes its sum over ranks; a gradient that is missing (a rank without samples) counts as zero.

        Collective. Losses are sums over a rank's samples divided by the global weight, so sums need no division.
        """
        if self._communicator.group is None:
            return
        for bucket in self._buckets:
            grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in bucket]
            flat = torch.cat([g.reshape(-1) for g in grads])
            all_reduce_sum(self._communicator, flat)
            self.bytes_reduced += flat.numel() * flat.element_size()
            for parameter, total in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = total.view_as(parameter)

    def broadcast_parameters(self, source: int = 0) -> None:
        """Every rank takes the parameters of one rank. Collective."""
        with torch.no_grad():
            for parameter in self._parameters:
                broadcast(self._communicator, parameter.data, source)


def _buckets(parameters: Sequence[torch.nn.Parameter], bucket_bytes: int) -> list[list[torch.nn.Parameter]]:
    """Runs of parameters of one type and device, each closed once it holds `bucket_bytes`."""
    buckets: list[list[torch.nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        fits = buckets and size < bucket_bytes and _kind(buckets[-1][0]) == _kind(parameter)
        if not fits:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return buckets


def _kind(parameter: torch.nn.Parameter) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device
