"""How the loss is computed where the config leaves it open: measured when a run begins, one value for all ranks.

The choice is a matter of rounding only. It is logged and saved in checkpoints, and a resumed run keeps it;
to replay a run, name its variant in the config.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import psutil
import torch

from nestrec.base.config import config
from nestrec.distributed import Topology
from nestrec.distributed.exchange import all_gather_json
from nestrec.ops.losses.candidates import make_candidates
from nestrec.ops.losses.sampled import VARIANTS, Variant, sampled_loss
from nestrec.ops.losses.softmax import SampledKind

_ROUNDS = 3
_OFFLOADED_SEGMENTS = 4
Measure = Callable[[Variant, "LossShape", torch.device], float]
"""Milliseconds of forward and backward of a loss."""


@config
class LossShape:
    """A micro-batch of about the size that training will have."""

    tokens: int
    """of the micro-batch"""
    negatives: int
    """drawn for a token"""
    sharing: int
    """tokens whose negatives one meets, itself included"""
    rows: int
    """distinct rows"""
    dim: int
    """channels"""
    segment_tokens: int
    """of a segment"""
    kind: SampledKind
    """the loss"""
    dtype: str
    """of the rows"""


def choose_variant(
    shape: LossShape, topology: Topology, memory_gib: float | None, measure: Measure | None = None
) -> tuple[Variant, dict[str, float]]:
    """The fastest that fits, and the milliseconds on the slowest rank of those that fit everywhere. Collective.

    fused fits always, so there is always something to choose. measure: `loss_milliseconds`, or another clock.
    """
    tried = [v for v in VARIANTS if _fits(v, shape, topology, memory_gib)]
    everyone = all_gather_json(
        topology.control, {v: _milliseconds(v, shape, topology, measure or loss_milliseconds) for v in tried}
    )
    slowest = {v: max(rank[v] for rank in everyone) for v in tried if all(v in rank for rank in everyone)}
    return min(slowest, key=lambda v: slowest[v]), {str(v): round(ms, 3) for v, ms in slowest.items()}


def _milliseconds(variant: Variant, shape: LossShape, topology: Topology, measure: Measure) -> float:
    """offload is measured on a few segments and counted up: all of a micro-batch would be pinned memory that stays."""
    tokens = min(shape.tokens, _OFFLOADED_SEGMENTS * shape.segment_tokens) if variant == "offload" else shape.tokens
    return measure(variant, replace(shape, tokens=tokens), topology.device) * shape.tokens / tokens


def loss_bytes(variant: Variant, shape: LossShape) -> int:
    """Bytes of candidate vectors and their gradients on the device, as the variant's code allocates them."""
    candidates = 1 + shape.negatives * shape.sharing
    vector = candidates * shape.dim * torch.empty((), dtype=getattr(torch, shape.dtype)).element_size()
    segment = 2 * min(shape.segment_tokens, shape.tokens) * vector
    return {"plain": 2 * shape.tokens * vector, "segments": segment, "offload": segment, "fused": 0}[variant]


def host_bytes(variant: Variant, shape: LossShape) -> int:
    """Bytes of candidate vectors in host memory."""
    return loss_bytes("plain", shape) // 2 if variant == "offload" else 0


def _fits(variant: Variant, shape: LossShape, topology: Topology, memory_gib: float | None) -> bool:
    """In what the loss may take of the device, and in as much of the host; without a GPU that is one memory."""
    of_host = psutil.virtual_memory().total / 4
    on_cuda = topology.device.type == "cuda"
    of_device = torch.cuda.mem_get_info(topology.device)[1] / 4 if on_cuda else of_host
    room = of_device if memory_gib is None else memory_gib * 2**30
    if not on_cuda:
        return loss_bytes(variant, shape) + host_bytes(variant, shape) <= room
    return loss_bytes(variant, shape) <= room and host_bytes(variant, shape) <= of_host


def loss_milliseconds(variant: Variant, shape: LossShape, device: torch.device) -> float:
    """Median of forward and backward on random numbers, after one that warms up."""
    draw = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, shape.dtype)
    query_TD = torch.randn(shape.tokens, shape.dim, generator=draw, dtype=dtype, device=device).requires_grad_()
    row_UD = torch.randn(shape.rows, shape.dim, generator=draw, dtype=dtype, device=device).requires_grad_()

    def places(*size: int, bound: int) -> torch.Tensor:
        return torch.randint(bound, size, generator=draw, dtype=torch.int32, device=device)

    candidates = make_candidates(
        places(shape.tokens, bound=shape.rows),
        places(shape.tokens, shape.negatives, bound=shape.rows),
        shared_TK=places(shape.tokens, shape.sharing - 1, bound=shape.tokens),
    )
    times = []
    for _ in range(_ROUNDS + 1):
        query_TD.grad = row_UD.grad = None
        _synchronise(device)
        start_s = time.perf_counter()
        loss_T = sampled_loss(
            query_TD, row_UD, candidates, shape.kind, variant=variant, segment_tokens=shape.segment_tokens
        )
        loss_T.sum().backward()
        _synchronise(device)
        times.append(1e3 * (time.perf_counter() - start_s))
    return statistics.median(times[1:])


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
