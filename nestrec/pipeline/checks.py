"""What a schedule cannot do, said before training begins."""

from typing import Literal

from nestrec.base.errors import UserError
from nestrec.embedding.flight.window_plan import MOST_PARTS
from nestrec.pipeline.stages import Coupling


def check_can_cache(num_parts: int | Literal["auto"]) -> None:
    """With the window cache each row names the micro-batch that uses it last, and that number has bounds."""
    if num_parts != "auto" and num_parts > MOST_PARTS:
        raise UserError(
            "is more than the window cache can tell apart", field="batch.micro_batches", value=num_parts,
            remedy=f"give at most {MOST_PARTS}, or set --pipeline.window_cache false",
        )  # fmt: skip


def check_can_cut(couples: Coupling, num_parts: int | Literal["auto"]) -> None:
    """Micro-batches are computed one by one, so a loss over the whole batch has no sum over them (coupled samples)."""
    if couples == "batch" and num_parts != 1:
        remedy = (
            "give 1 (every schedule takes it; dual_buffer and nested still hide the lookup), or confine the loss to a "
            "micro-batch: task.negatives.reach=micro_batch, or couples_samples of a task of your own"
        )
        raise UserError(
            "the loss couples the samples of the whole batch, which may not be cut", field="batch.micro_batches",
            value=num_parts, remedy=remedy,
        )  # fmt: skip
