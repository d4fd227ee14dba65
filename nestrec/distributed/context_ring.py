"""The ring of a context group: ranks that hold parts of the same sequences hand keys and values on to each other."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nestrec.distributed.collectives import all_to_all_rows
from nestrec.distributed.topology import Topology

Issue = Callable[[Callable[[], Any]], Any]


class ContextRing:
    """Hands tensors on over the communicator of a context group, in the order of collectives of whoever trains.

    Exchanges happen in the middle of a computation. A schedule that issues collectives from a thread of its own is told
    of them through `issue`, so that all ranks issue everything in one order.
    """

    def __init__(self, topology: Topology) -> None:
        self._communicator = topology.context
        self.rank = topology.context.rank
        self.size = topology.context.size
        self.issue: Issue = _at_once
        """runs a collective in its place and waits for it; a pipeline that is given this ring sets it"""
        self.bytes_sent = 0
        """by this rank so far"""

    def shift(self, tokens: Mapping[str, torch.Tensor], num_tokens: int) -> dict[str, torch.Tensor]:
        """Hand (T, ...) tensors on to the next rank; those of the rank before, of `num_tokens` each. Collective."""
        if self.size == 1:
            return dict(tokens)
        # In one exchange, as bytes; wide types first, so that each begins where its type may.
        names = sorted(tokens, key=lambda name: -tokens[name].element_size())
        sent = torch.cat([_bytes(tokens[name]) for name in names])
        sizes = [num_tokens * _row_bytes(tokens[name]) for name in names]
        send, receive = [0] * self.size, [0] * self.size
        send[(self.rank + 1) % self.size] = len(sent)
        receive[self.rank - 1] = sum(sizes)
        came: torch.Tensor = self.issue(lambda: all_to_all_rows(self._communicator, sent, send, receive))
        self.bytes_sent += len(sent)
        if came.is_cuda:  # made in the stream that exchanges, used in the one that computes
            came.record_stream(torch.cuda.current_stream())
        pieces = zip(names, came.split(sizes), strict=True)
        return {
            name: piece.view(tokens[name].dtype).view(num_tokens, *tokens[name].shape[1:]) for name, piece in pieces
        }


def _at_once(collective: Callable[[], Any]) -> Any:
    return collective()


def _row_bytes(x: torch.Tensor) -> int:
    return x.element_size() * math.prod(x.shape[1:])


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)
