"""Dense gradients summed over ranks: one reduction over fixed buckets in parameter order.

The buckets are a function of the parameters alone, so the order of every sum is the same in each step, in each run and
after a resume. A parameter without a gradient on this rank counts as zero.
"""

from collections.abc import Sequence

import torch

from nestrec.distributed.exchange import all_reduce_sum
from nestrec.distributed.topology import Communicator

BUCKET_BYTES = 25 << 20


class DenseSync:
    """Sums the gradients of `parameters` over the ranks of a communicator, in place."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], communicator: Communicator):
        self._communicator = communicator
        self._buckets = make_buckets(parameters)

    def sum_gradients(self, extra: torch.Tensor) -> None:
        """Sum all gradients and, last, the small tensor `extra` (such as the loss)."""
        for bucket in self._buckets:
            self._sum_bucket(bucket)
        all_reduce_sum(self._communicator, extra)

    def _sum_bucket(self, bucket: list[torch.nn.Parameter]) -> None:
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._communicator.group is None:
            return
        gradients = [p.grad for p in bucket if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in gradients])
        all_reduce_sum(self._communicator, flat)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def make_buckets(parameters: Sequence[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Consecutive parameters of one type, up to BUCKET_BYTES together."""
    buckets: list[list[torch.nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        num_bytes = parameter.numel() * parameter.element_size()
        if not buckets or size + num_bytes > BUCKET_BYTES or buckets[-1][-1].dtype != parameter.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += num_bytes
    return buckets
