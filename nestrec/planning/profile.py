"""What the operations of a step take on a machine: a line for each, measured by `nestrec bench calibrate` or given.

The amounts that an operation is charged for stand beside its name. Time on links is not here (see links).
"""

from typing import Literal

from nestrec.base.bounds import NonNegative
from nestrec.base.config import config

StoreKind = Literal["device", "dram", "disk"]


@config
class Rate:
    """Seconds of an operation: `fixed_s + unit_s * amount`."""

    fixed_s: NonNegative = 0.0
    """however little there is to do"""
    unit_s: NonNegative = 0.0
    """for each unit of its amount"""

    def of(self, amount: float) -> float:
        return self.fixed_s + self.unit_s * amount


@config
class StoreRates:
    """Rows between a store and the buffers of the device; for each byte of rows."""

    fetch: Rate = Rate()
    """from the store"""
    write_back: Rate = Rate()
    """to the store"""


@config
class ComputeRates:
    """Forward and backward of a micro-batch."""

    fixed_s: NonNegative = 0.0
    """launches and whatever does not depend on tokens"""
    flop_s: NonNegative = 0.0
    """for each operation that grows with tokens"""
    attention_flop_s: NonNegative = 0.0
    """for each operation that grows with the square of a length"""


@config
class Profile:
    """A device and its host."""

    deduplicate: Rate = Rate()
    """for each key of the batch"""
    exchange_keys: Rate = Rate()
    """work of the host, for each key asked for"""
    arrange: Rate = Rate()
    """for each key asked for, over all micro-batches"""
    device: StoreRates = StoreRates()
    """rows kept on the device"""
    dram: StoreRates = StoreRates()
    """rows kept in host memory"""
    disk: StoreRates = StoreRates()
    """rows kept on disk"""
    exchange_vectors: Rate = Rate()
    """putting together, for each byte sent"""
    exchange_gradients: Rate = Rate()
    """putting together, for each byte sent"""
    add_gradients: Rate = Rate()
    """for each byte received"""
    peers: Rate = Rate()
    """work of the host in an exchange of keys, vectors or gradients, for each rank of the group (`nestrec bench host`
    says how it grows)"""
    update_rows: Rate = Rate()
    """for each byte of rows"""
    intersect: Rate = Rate()
    """rows in both of two batches, for each row of a batch"""
    copy: Rate = Rate()
    """for each byte of rows in both"""
    dense_reduce: Rate = Rate()
    """work of the device, for each byte of dense gradients"""
    dense_apply: Rate = Rate()
    """for each byte of dense weights"""
    compute: ComputeRates = ComputeRates()
    """the model"""

    def store(self, kind: StoreKind) -> StoreRates:
        return {"device": self.device, "dram": self.dram, "disk": self.disk}[kind]
