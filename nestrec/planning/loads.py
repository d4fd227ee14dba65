"""What each rank has to do in each step: tokens, keys, bytes. Arrays over (steps of a pattern, ranks, micro-batches).

Counted from batches, or expected from distributions (see expected_loads); costs are made of them, and of nothing else.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Amounts = NDArray[np.float64]

KEY_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Loads:
    """Amounts of some steps, which repeat."""

    linear_flops: Amounts
    """(P, R, N) operations that grow with tokens"""
    attention_flops: Amounts
    """(P, R, N) operations that grow with squares of lengths"""
    keys: Amounts
    """(P, R) keys of a batch, repeats included"""
    asked: Amounts
    """(P, R, N) distinct keys that are asked for with each micro-batch"""
    received_bytes: Amounts
    """(P, R, N) vectors that the source receives; as many bytes of gradients leave it with or after the micro-batch"""
    served_bytes: Amounts
    """(P, R, N) vectors that the owner sends"""
    returned_bytes: Amounts
    """(P, R, N) gradients that the source sends"""
    summed_bytes: Amounts
    """(P, R, N) gradients that the owner receives"""
    rows: Amounts
    """(P, R) rows that the owner fetches"""
    row_bytes: Amounts
    """(P, R) their bytes, state included"""
    gradient_bytes: Amounts
    """(P, R) bytes of the sums of their gradients"""
    completed_bytes: Amounts
    """(P, R, N) of those of its own group, what each micro-batch completes: that crosses to the other holders"""
    shared_rows: Amounts
    """(P, R) of them also in the next batch"""
    shared_bytes: Amounts
    """(P, R) their bytes, state included"""
    dense_bytes: float
    """of dense gradients"""

    @property
    def num_micro_batches(self) -> int:
        return int(self.linear_flops.shape[2])

    @property
    def world(self) -> int:
        return int(self.linear_flops.shape[1])

    def place(self, step: int) -> int:
        """Where a step stands in the pattern."""
        return step % len(self.keys)

    def starting_at(self, step: int) -> "Loads":
        """The same steps from another one on: its step 1 is step `step` + 1 of this."""
        turned: dict[str, Any] = {
            field.name: np.roll(getattr(self, field.name), -step, axis=0)
            for field in dataclasses.fields(self)
            if field.name != "dense_bytes"
        }
        return dataclasses.replace(self, **turned)
