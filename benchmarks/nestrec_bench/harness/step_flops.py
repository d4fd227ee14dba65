"""Floating-point operations of a training step, and the model FLOPs utilization (MFU).

    projections   2 * tokens * weights of the layers' matrices            forward; twice that in the backward pass
    attention     2 * sum(L (L + 1)) * heads * head_dim                   forward: two products, j <= i; backward 2.5x
    channels      sum(L (L + 1)) * heads * head_dim                       each of FuXi's bias channels; backward 2x
                  with a window or truncation: twice the number of attended pairs instead of L (L + 1)
    MFU           (projections + attention + channels, forward and backward) / time / peak

Only valid tokens are counted, and causal attention is counted once; recomputation and padding are not counted. The
products of the head and the loss are listed separately and are not included in the MFU.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nestrec.models.backbone_registry import flops_of
from nestrec.models.backbone_spec import BackboneConfig

PEAK_TFLOPS = 989.0
"""Peak rate of dense bf16 operations of H100 and H200 (SXM), from the datasheet."""
FORMULA = (
    "MFU = FLOPs of the layers, forward + backward / (step time x 989 TFLOP/s). FLOPs: 6 x valid tokens x weights"
    " of the matrices + 3.5 x 2 x sum(L(L+1)) x heads x head_dim (causal attention once)"
    " + FuXi: 3 x sum(L(L+1)) x heads x head_dim per bias channel."
    " Valid tokens only; recomputation, padding, embedding, head and loss are not counted."
)


@dataclass(frozen=True, slots=True)
class StepFlops:
    """Floating-point operations of one step, forward and backward."""

    projections: float
    attention: float

    @property
    def total(self) -> float:
        return self.projections + self.attention

    def tflops(self, seconds: float) -> float:
        return self.total / seconds / 1e12

    def mfu(self, seconds: float) -> float:
        """Return the fraction of the peak rate, from 0 to 1."""
        return self.tflops(seconds) / PEAK_TFLOPS


def step_flops(encoder: BackboneConfig, lengths: NDArray[np.int64]) -> StepFlops:
    """Return the operations of the encoder's layers for sequences of these lengths."""
    forward = flops_of(encoder)
    return StepFlops(
        projections=3.0 * forward.token * forward.tokens(lengths),
        attention=(3.5 * forward.pair + 3.0 * forward.channel_pair) * forward.pairs(lengths),
    )


def loss_flops(tokens: int, candidates: int, dim: int) -> float:
    """Return the operations of the dot products of every token with its candidates, forward and backward."""
    return 6.0 * tokens * candidates * dim
