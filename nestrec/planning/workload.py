"""Workload of a recipe, and the work of each rank per step: the inputs of the cost model.

`Workload` describes a recipe: sequence lengths, lookups and unique keys, tables, model. `Loads` contains the amounts of
each rank (tokens, keys, bytes), either counted on batches or computed from distributions (see `expected_loads`).

Legend: P steps of a repeating pattern, R ranks, N micro-batches.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.embedding.table_config import Placement
from nestrec.planning.hardware_profile import StoreKind

Amounts = NDArray[np.float64]

KEY_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Loads:
    """Work of all ranks for some steps, which repeat as a pattern."""

    linear_flops: Amounts
    """(P, R, N) floating-point operations that scale with the number of tokens."""
    attention_flops: Amounts
    """(P, R, N) floating-point operations that scale with squared sequence lengths."""
    keys: Amounts
    """(P, R) keys of a batch, including duplicates."""
    requested_keys: Amounts
    """(P, R, N) unique keys whose embeddings each micro-batch requests."""
    received_bytes: Amounts
    """(P, R, N) bytes of embeddings that the requesting rank receives."""
    served_bytes: Amounts
    """(P, R, N) bytes of embeddings that the owner sends."""
    returned_bytes: Amounts
    """(P, R, N) bytes of gradients that the requesting rank sends."""
    summed_bytes: Amounts
    """(P, R, N) bytes of gradients that the owner receives."""
    rows: Amounts
    """(P, R) rows that the owner fetches."""
    row_bytes: Amounts
    """(P, R) bytes of these rows, including optimizer state."""
    gradient_bytes: Amounts
    """(P, R) bytes of the gradient sums of these rows."""
    completed_bytes: Amounts
    """(P, R, N) bytes of gradient sums that are complete after a micro-batch and are sent to the other replicas."""
    shared_rows: Amounts
    """(P, R) rows that the next batch uses, too."""
    shared_bytes: Amounts
    """(P, R) bytes of the shared rows, including optimizer state."""
    dense_bytes: float
    """Bytes of the dense gradients."""

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of a rank's batch."""
        return int(self.linear_flops.shape[2])

    @property
    def world(self) -> int:
        """Number of ranks."""
        return int(self.linear_flops.shape[1])

    def pattern_index(self, step: int) -> int:
        """Return the index of a step in the pattern."""
        return step % len(self.keys)

    def starting_at(self, step: int) -> "Loads":
        """Return the same pattern, starting `step` steps later: its step 1 is step `step` + 1 of this one."""
        shifted: dict[str, Any] = {
            field.name: np.roll(getattr(self, field.name), -step, axis=0)
            for field in dataclasses.fields(self)
            if field.name != "dense_bytes"
        }
        return dataclasses.replace(self, **shifted)


@config
class TableLoad:
    """Size of a table and how batches read it."""

    name: str
    """Name of the table."""
    rows: int
    """Number of keys that can occur; for a dynamic table the number of keys seen."""
    row_bytes: int
    """Bytes of a row: weight and optimizer state."""
    weight_bytes: int
    """Bytes of an embedding in a transfer."""
    gradient_bytes: int
    """Bytes of the gradient of a row in a transfer."""
    keys_per_token: float
    """Number of keys looked up per token of the model."""
    seen_keys: tuple[float, ...]
    """Numbers of keys at which unique keys were counted, increasing."""
    distinct_keys: tuple[float, ...]
    """Number of unique keys among each of `seen_keys`."""
    has_fixed_rows: bool = False
    """Whether the table has a fixed number of rows, so that it can be replicated on every rank."""
    store: StoreKind = "device"
    """Store of the table in the recipe."""
    keeps_store: bool = False
    """Whether the plan must keep this store."""
    placement: Placement | None = None
    """Placement that the user has set (sharded or replicated); none if the plan can choose."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer state of a row."""
        return self.row_bytes - self.weight_bytes

    def distinct(self, keys: Amounts) -> Amounts:
        """Return the expected number of unique keys among `keys` keys, at most `rows`.

        The counted points are interpolated and extrapolated as a power law.
        """
        x, y = np.log(np.array(self.seen_keys)), np.log(np.array(self.distinct_keys))
        requested = np.log(np.maximum(keys, 1e-9))
        inside = np.interp(requested, x, y)
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2]) if len(x) > 1 else 0.0
        grown = np.where(requested > x[-1], y[-1] + slope * (requested - x[-1]), inside)
        few = np.where(requested < x[0], np.minimum(requested, y[0]), grown)
        unique: Amounts = np.minimum(np.minimum(np.exp(few), self.rows), keys)
        return unique


@config
class Workload:
    """Measured properties of a recipe: the input of the planner."""

    name: str
    """Name of the recipe."""
    batch_samples: int
    """Number of samples of a global batch."""
    lengths: tuple[float, ...]
    """Quantiles of the number of tokens per sample, evenly spaced from minimum to maximum."""
    tables: tuple[TableLoad, ...]
    """Embedding tables."""
    dense_parameters: int
    """Number of dense parameters of the model."""
    flops_per_token: float
    """Floating-point operations per token of the forward and backward pass."""
    flops_per_token_squared: float
    """Floating-point operations per squared sequence length."""
    activation_bytes_per_token: float
    """Bytes of activations per token that are saved for the backward pass."""
    may_be_cut: bool = True
    """Whether a rank's batch can be split into several micro-batches."""

    def draw_lengths(self, num_samples: int, seed: Sequence[int]) -> NDArray[np.float64]:
        """Sample the lengths of `num_samples` samples from the quantiles."""
        positions = np.random.default_rng(list(seed)).random(num_samples) * (len(self.lengths) - 1)
        drawn: NDArray[np.float64] = np.rint(np.interp(positions, np.arange(len(self.lengths)), np.array(self.lengths)))
        return drawn

    @property
    def mean_length(self) -> float:
        """Mean number of tokens per sample."""
        return float(np.mean(self.lengths))
