"""What a recipe asks of a cluster: samples and their lengths, keys and how often they repeat, tables, the model.

What each rank has to do in each step: tokens, keys, bytes. Arrays over (steps of a pattern, ranks, micro-batches).

Counted from batches, or expected from distributions (see expected_loads); costs are made of them, and of nothing else.
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


@config
class TableLoad:
    """A table, and how a batch reads it."""

    name: str
    """of the table"""
    rows: int
    """keys that may be asked for; of a dynamic table those that were seen"""
    row_bytes: int
    """weight and optimiser state"""
    weight_bytes: int
    """a vector on the wire"""
    gradient_bytes: int
    """the gradient of a row on the wire"""
    keys_a_token: float
    """keys looked up for each token that the model computes"""
    seen_keys: tuple[float, ...]
    """numbers of keys for which distinct ones were counted, increasing"""
    distinct_keys: tuple[float, ...]
    """how many of them were distinct"""
    has_fixed_rows: bool = False
    """it could be held whole by every rank"""
    store: StoreKind = "device"
    """where the recipe keeps its rows"""
    keeps_store: bool = False
    """its rows stay there, whatever a plan would choose"""
    placement: Placement | None = None
    """sharded or replicated, where that was said of it; none: a plan may choose"""

    @property
    def state_bytes(self) -> int:
        return self.row_bytes - self.weight_bytes

    def distinct(self, keys: Amounts) -> Amounts:
        """Expected distinct keys among so many: between and beyond the counted points as a power law, up to `rows`."""
        x, y = np.log(np.array(self.seen_keys)), np.log(np.array(self.distinct_keys))
        asked = np.log(np.maximum(keys, 1e-9))
        inside = np.interp(asked, x, y)
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2]) if len(x) > 1 else 0.0
        grown = np.where(asked > x[-1], y[-1] + slope * (asked - x[-1]), inside)
        few = np.where(asked < x[0], np.minimum(asked, y[0]), grown)
        found: Amounts = np.minimum(np.minimum(np.exp(few), self.rows), keys)
        return found


@config
class Workload:
    """A recipe as the planner sees it."""

    name: str
    """of the recipe"""
    batch_samples: int
    """of a global batch"""
    lengths: tuple[float, ...]
    """quantiles of the tokens of a sample, evenly spaced from the shortest to the longest"""
    tables: tuple[TableLoad, ...]
    """what is looked up"""
    dense_parameters: int
    """weights of the model outside the tables"""
    flops_a_token: float
    """operations of forward and backward that grow with tokens"""
    flops_a_token_squared: float
    """operations that grow with the square of a length"""
    activation_bytes_a_token: float
    """kept from forward to backward"""
    may_be_cut: bool = True
    """whether a rank's batch may be computed in several micro-batches"""

    def draw_lengths(self, num_samples: int, seed: Sequence[int]) -> NDArray[np.float64]:
        """Lengths of some samples."""
        places = np.random.default_rng(list(seed)).random(num_samples) * (len(self.lengths) - 1)
        drawn: NDArray[np.float64] = np.rint(np.interp(places, np.arange(len(self.lengths)), np.array(self.lengths)))
        return drawn

    @property
    def mean_length(self) -> float:
        return float(np.mean(self.lengths))
