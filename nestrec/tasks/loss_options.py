"""Checks and choices of loss options: negatives and memory variants.

Negatives that no micro-batch could supply are refused before training begins.

How the loss is computed where the config leaves it open: measured when a run begins, one value for all ranks.

The choice is a matter of rounding only. It is logged and saved in checkpoints, and a resumed run keeps it;
to replay a run, name its variant in the config.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import psutil
import torch

from nestrec.base.config import config
from nestrec.base.errors import UserError
from nestrec.data.batch_loader import BatchConfig, Collator
from nestrec.distributed import Topology
from nestrec.distributed.collectives import all_gather_json
from nestrec.models.heads import NegativesConfig
from nestrec.ops.losses.item_losses import SampledKind, make_candidates
from nestrec.ops.losses.sampled_losses import VARIANTS, Variant, sampled_loss


def check_supply(
    negatives: NegativesConfig, num_negatives: int, assembler: Collator, batch: BatchConfig, world: int
) -> None:
    """Sharing and in-batch negatives are confined to a micro-batch (coupled samples): its tokens must suffice."""
    largest = largest_micro_batch(assembler, batch, world)
    if negatives.sharing > max(largest, 1):
        raise UserError(
            f"needs so many tokens in a micro-batch, and the largest has {largest}",
            option="task.negatives.sharing",
            value=negatives.sharing,
            remedy="share less, or take larger or fewer micro-batches",
        )
    sampler = negatives.sampler
    if sampler == "groups" and negatives.sharing > 1:
        raise UserError(
            "tokens of a group share their negatives already",
            option="task.negatives.sharing",
            value=negatives.sharing,
            remedy="take more task.num_negatives, or another sampler",
        )
    if sampler in ("in_batch", "groups") and num_negatives >= largest:
        raise UserError(
            f"{sampler} draws from the other tokens of a micro-batch, and the largest has {largest} tokens",
            option="task.num_negatives",
            value=num_negatives,
            remedy="take fewer negatives, larger or fewer micro-batches, or another task.negatives.sampler",
        )


def largest_micro_batch(assembler: Collator, batch: BatchConfig, world: int) -> int:
    """Tokens of a micro-batch of the longest samples, dealt evenly."""
    parts = world * (1 if batch.micro_batches == "auto" else batch.micro_batches)
    longest = int(assembler.tokens.max(initial=0))
    if batch.batch_samples is not None:
        count = -(-batch.batch_samples // parts)
        return int(np.sort(assembler.tokens)[::-1][:count].sum())
    return -(-(batch.batch_tokens or 0) // parts) + longest


def mean_micro_batch(assembler: Collator, batch: BatchConfig, world: int) -> int:
    """Tokens of a micro-batch on average, at least 1."""
    parts = world * (1 if batch.micro_batches == "auto" else batch.micro_batches)
    if batch.batch_samples is not None:
        return max(1, round(float(assembler.tokens.mean()) * batch.batch_samples / parts))
    return max(1, (batch.batch_tokens or 0) // parts)


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
