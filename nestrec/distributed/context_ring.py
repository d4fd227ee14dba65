"""Communication ring of context parallelism (ring attention).

The ranks of a context group hold parts of the same sequences and pass keys and values from rank to rank.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nestrec.distributed.collectives import all_to_all_rows
from nestrec.distributed.topology import Topology

Issue = Callable[[Callable[[], Any]], Any]


class ContextRing:
    """Ring over the communicator of a context group.

    Shifts happen in the middle of the forward and backward pass. A pipeline that issues its collectives from a separate
    thread sets `issue` to run the shifts on that thread too, so that all ranks issue all collectives in the same order.

    Args:
        topology: Topology whose context groups hold parts of the same sequences.
    """

    def __init__(self, topology: Topology) -> None:
        self._communicator = topology.context
        self.rank = topology.context.rank
        self.size = topology.context.size
        self.issue: Issue = _run_now
        """Function that runs a collective in the order of the training loop and waits for it; the pipeline sets it."""
        self.bytes_sent = 0
        """Number of bytes that this rank has sent so far."""

    def shift(self, tokens: Mapping[str, torch.Tensor], num_tokens: int) -> dict[str, torch.Tensor]:
        """Send tensors to the next rank and return those of the previous rank. Collective.

        Args:
            tokens: Tensors by name, (T, ...) each, with one row per token.
            num_tokens: Number of rows of each tensor of the previous rank.

        Returns:
            The tensors of the previous rank by name, (num_tokens, ...) each.
        """
        if self.size == 1:
            return dict(tokens)
        # All tensors are sent as bytes in one all-to-all. Wide types come first, so that every tensor is aligned.
        names = sorted(tokens, key=lambda name: -tokens[name].element_size())
        sent = torch.cat([_bytes(tokens[name]) for name in names])
        sizes = [num_tokens * _row_bytes(tokens[name]) for name in names]
        send, receive = [0] * self.size, [0] * self.size
        send[(self.rank + 1) % self.size] = len(sent)
        receive[self.rank - 1] = sum(sizes)
        received: torch.Tensor = self.issue(lambda: all_to_all_rows(self._communicator, sent, send, receive))
        self.bytes_sent += len(sent)
        if received.is_cuda:  # allocated on the communication stream, used on the compute stream
            received.record_stream(torch.cuda.current_stream())
        parts = zip(names, received.split(sizes), strict=True)
        return {name: part.view(tokens[name].dtype).view(num_tokens, *tokens[name].shape[1:]) for name, part in parts}


def _run_now(collective: Callable[[], Any]) -> Any:
    return collective()


def _row_bytes(x: torch.Tensor) -> int:
    return x.element_size() * math.prod(x.shape[1:])


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)
