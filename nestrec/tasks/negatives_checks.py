"""Negatives that no micro-batch could supply are refused before training begins."""

import numpy as np

from nestrec.base.errors import UserError
from nestrec.data.batches import Assembler, BatchConfig
from nestrec.models.negatives import NegativesConfig


def check_supply(
    negatives: NegativesConfig, num_negatives: int, assembler: Assembler, batch: BatchConfig, world: int
) -> None:
    """Sharing and in-batch negatives are confined to a micro-batch (coupled samples): its tokens must suffice."""
    largest = largest_micro_batch(assembler, batch, world)
    if negatives.sharing > max(largest, 1):
        raise UserError(
            f"needs so many tokens in a micro-batch, and the largest has {largest}",
            field="task.negatives.sharing",
            value=negatives.sharing,
            remedy="share less, or take larger or fewer micro-batches",
        )
    sampler = negatives.sampler
    if sampler == "groups" and negatives.sharing > 1:
        raise UserError(
            "tokens of a group share their negatives already",
            field="task.negatives.sharing",
            value=negatives.sharing,
            remedy="take more task.num_negatives, or another sampler",
        )
    if sampler in ("in_batch", "groups") and num_negatives >= largest:
        raise UserError(
            f"{sampler} draws from the other tokens of a micro-batch, and the largest has {largest} tokens",
            field="task.num_negatives",
            value=num_negatives,
            remedy="take fewer negatives, larger or fewer micro-batches, or another task.negatives.sampler",
        )


def largest_micro_batch(assembler: Assembler, batch: BatchConfig, world: int) -> int:
    """Tokens of a micro-batch of the longest samples, dealt evenly."""
    parts = world * (1 if batch.micro_batches == "auto" else batch.micro_batches)
    longest = int(assembler.tokens.max(initial=0))
    if batch.batch_samples is not None:
        count = -(-batch.batch_samples // parts)
        return int(np.sort(assembler.tokens)[::-1][:count].sum())
    return -(-(batch.batch_tokens or 0) // parts) + longest


def mean_micro_batch(assembler: Assembler, batch: BatchConfig, world: int) -> int:
    """Tokens of a micro-batch on average, at least 1."""
    parts = world * (1 if batch.micro_batches == "auto" else batch.micro_batches)
    if batch.batch_samples is not None:
        return max(1, round(float(assembler.tokens.mean()) * batch.batch_samples / parts))
    return max(1, (batch.batch_tokens or 0) // parts)
