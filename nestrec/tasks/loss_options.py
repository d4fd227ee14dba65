"""Checks of negative sampling options, and the measured choice of the loss implementation.

Options that need more negatives than a micro-batch can supply are rejected before training starts.

If `task.negatives.loss_variant` is `auto`, the implementations of the sampled loss are timed when a run starts, and the
fastest one that fits into memory is used on all ranks. The variants differ in rounding only. The choice is logged and
saved in checkpoints, so a resumed run keeps it; to reproduce a run, set its variant in the config.
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


def check_enough_negatives(
    negatives: NegativesConfig, num_negatives: int, collator: Collator, batch: BatchConfig, world: int
) -> None:
    """Raise a UserError if a micro-batch has too few tokens for logit sharing or in-batch negatives."""
    largest = largest_micro_batch_tokens(collator, batch, world)
    if negatives.logit_sharing > max(largest, 1):
        raise UserError(
            f"needs at least as many tokens in a micro-batch, but the largest has {largest}",
            option="task.negatives.logit_sharing",
            value=negatives.logit_sharing,
            remedy="use a smaller value, or larger or fewer micro-batches",
        )
    sampler = negatives.sampler
    if sampler == "groups" and negatives.logit_sharing > 1:
        raise UserError(
            "cannot be combined with task.negatives.sampler=groups, whose tokens share their negatives already",
            option="task.negatives.logit_sharing",
            value=negatives.logit_sharing,
            remedy="increase task.negatives.num_negatives, or use another sampler",
        )
    if sampler in ("in_batch", "groups") and num_negatives >= largest:
        raise UserError(
            f"the sampler {sampler} draws from the other tokens of a micro-batch, but the largest has {largest} tokens",
            option="task.negatives.num_negatives",
            value=num_negatives,
            remedy="use fewer negatives, larger or fewer micro-batches, or another task.negatives.sampler",
        )


def largest_micro_batch_tokens(collator: Collator, batch: BatchConfig, world: int) -> int:
    """Return the number of tokens of a micro-batch that consists of the longest samples, evenly distributed."""
    parts = world * (1 if batch.num_micro_batches == "auto" else batch.num_micro_batches)
    longest = int(collator.tokens.max(initial=0))
    if batch.batch_size is not None:
        count = -(-batch.batch_size // parts)
        return int(np.sort(collator.tokens)[::-1][:count].sum())
    return -(-(batch.batch_tokens or 0) // parts) + longest


def mean_micro_batch_tokens(collator: Collator, batch: BatchConfig, world: int) -> int:
    """Return the mean number of tokens of a micro-batch, at least 1."""
    parts = world * (1 if batch.num_micro_batches == "auto" else batch.num_micro_batches)
    if batch.batch_size is not None:
        return max(1, round(float(collator.tokens.mean()) * batch.batch_size / parts))
    return max(1, (batch.batch_tokens or 0) // parts)


_ROUNDS = 3
_OFFLOADED_SEGMENTS = 4
Measure = Callable[[Variant, "LossShape", torch.device], float]
"""Function that measures the milliseconds of a forward and backward pass of the loss."""


@config
class LossShape:
    """Shape of the loss of a typical micro-batch of a run."""

    tokens: int
    """Number of tokens of the micro-batch."""
    negatives: int
    """Number of negatives drawn per token."""
    sharing: int
    """Number of tokens whose negatives a token is compared with, including itself."""
    rows: int
    """Number of unique embedding rows."""
    dim: int
    """Embedding dimension."""
    segment_tokens: int
    """Number of tokens per segment."""
    kind: SampledKind
    """Loss function."""
    dtype: str
    """Data type of the embedding rows."""


def choose_variant(
    shape: LossShape, topology: Topology, memory_gib: float | None, measure: Measure | None = None
) -> tuple[Variant, dict[str, float]]:
    """Choose the fastest loss variant that fits into memory on all ranks. Collective.

    Args:
        shape: Shape of the loss.
        topology: Ranks of the run.
        memory_gib: Memory limit in GiB; None for a quarter of the device memory.
        measure: Function that times a variant; None for `loss_milliseconds`.

    Returns:
        The variant, and the milliseconds on the slowest rank of each variant that fits. `fused` always fits.
    """
    candidates = [v for v in VARIANTS if _fits(v, shape, topology, memory_gib)]
    everyone = all_gather_json(
        topology.control, {v: _milliseconds(v, shape, topology, measure or loss_milliseconds) for v in candidates}
    )
    slowest = {v: max(rank[v] for rank in everyone) for v in candidates if all(v in rank for rank in everyone)}
    return min(slowest, key=lambda v: slowest[v]), {str(v): round(ms, 3) for v, ms in slowest.items()}


def _milliseconds(variant: Variant, shape: LossShape, topology: Topology, measure: Measure) -> float:
    """Measure a variant; `offload` is extrapolated from a few segments, because pinned memory is never released."""
    tokens = min(shape.tokens, _OFFLOADED_SEGMENTS * shape.segment_tokens) if variant == "offload" else shape.tokens
    return measure(variant, replace(shape, tokens=tokens), topology.device) * shape.tokens / tokens


def loss_bytes(variant: Variant, shape: LossShape) -> int:
    """Return the device bytes that a variant allocates for candidate vectors and their gradients."""
    candidates = 1 + shape.negatives * shape.sharing
    vector = candidates * shape.dim * torch.empty((), dtype=getattr(torch, shape.dtype)).element_size()
    segment = 2 * min(shape.segment_tokens, shape.tokens) * vector
    return {"plain": 2 * shape.tokens * vector, "segments": segment, "offload": segment, "fused": 0}[variant]


def host_bytes(variant: Variant, shape: LossShape) -> int:
    """Return the host bytes that a variant allocates for candidate vectors."""
    return loss_bytes("plain", shape) // 2 if variant == "offload" else 0


def _fits(variant: Variant, shape: LossShape, topology: Topology, memory_gib: float | None) -> bool:
    """Return whether a variant fits into the memory limits of device and host, which are one memory without a GPU."""
    of_host = psutil.virtual_memory().total / 4
    on_cuda = topology.device.type == "cuda"
    of_device = torch.cuda.mem_get_info(topology.device)[1] / 4 if on_cuda else of_host
    limit = of_device if memory_gib is None else memory_gib * 2**30
    if not on_cuda:
        return loss_bytes(variant, shape) + host_bytes(variant, shape) <= limit
    return loss_bytes(variant, shape) <= limit and host_bytes(variant, shape) <= of_host


def loss_milliseconds(variant: Variant, shape: LossShape, device: torch.device) -> float:
    """Return the median milliseconds of a forward and backward pass on random data, after one warm-up pass."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, shape.dtype)
    query_TD = torch.randn(shape.tokens, shape.dim, generator=generator, dtype=dtype, device=device).requires_grad_()
    row_UD = torch.randn(shape.rows, shape.dim, generator=generator, dtype=dtype, device=device).requires_grad_()

    def random_index(*size: int, bound: int) -> torch.Tensor:
        return torch.randint(bound, size, generator=generator, dtype=torch.int32, device=device)

    candidates = make_candidates(
        random_index(shape.tokens, bound=shape.rows),
        random_index(shape.tokens, shape.negatives, bound=shape.rows),
        shared_TK=random_index(shape.tokens, shape.sharing - 1, bound=shape.tokens),
    )
    times = []
    for _ in range(_ROUNDS + 1):
        query_TD.grad = row_UD.grad = None
        _synchronize(device)
        start_s = time.perf_counter()
        loss_T = sampled_loss(
            query_TD, row_UD, candidates, shape.kind, variant=variant, segment_tokens=shape.segment_tokens
        )
        loss_T.sum().backward()
        _synchronize(device)
        times.append(1e3 * (time.perf_counter() - start_s))
    return statistics.median(times[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
