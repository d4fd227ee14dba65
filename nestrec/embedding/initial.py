"""Deterministic initial rows: element j of key k in a table with seed s is a function of the 64-bit hash fold(s, k, j).

    normal   the four 16-bit lanes of the hash are summed as integers, centered, and scaled by one float multiplication:
             an Irwin-Hall sum, close to normal, of variance scale ** 2
    uniform  the upper 24 bits of the hash, centered, scaled by one float multiplication: in [-scale, scale)

All steps before the last multiplication use integers, so numpy, torch on a CPU and torch on a GPU return bitwise
identical values.
"""

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.base.cuda import to_device
from nestrec.base.random import GOLDEN64, MULTIPLIERS64, fold, mix64_jit
from nestrec.embedding.row_optimizer import RowLayout
from nestrec.embedding.table_config import InitConfig, TableConfig

_LANE_STD = float(np.sqrt((65536.0**2 - 1) / 3))
_CHUNK_ROWS = 1 << 16


def multiplier_of(init: InitConfig) -> float:
    """Return the factor by which the centered integer is multiplied."""
    return init.scale / _LANE_STD if init.kind == "normal" else init.scale / (1 << 23)


@njit(cache=True, nogil=True)
def _fill(keys, seed_key, dim, multiplier, is_normal, out):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    mask = np.uint64(0xFFFF)
    s16, s32, s48, s40 = np.uint64(16), np.uint64(32), np.uint64(48), np.uint64(40)
    for i in range(len(keys)):
        base = mix64_jit(seed_key ^ np.uint64(keys[i]))
        for j in range(dim):
            h = mix64_jit(base ^ np.uint64(j))
            if is_normal:
                lanes = (h & mask) + ((h >> s16) & mask) + ((h >> s32) & mask) + (h >> s48)
                centered = np.int64(lanes) - 131070
            else:
                centered = np.int64(h >> s40) - 8388608
            out[i, j] = out.dtype.type(centered) * multiplier


def initial_vectors(keys: NDArray[np.int64], table: TableConfig) -> torch.Tensor:
    """Return the (n, dim) initial vectors of keys on the host, in the weight dtype of the table."""
    compute = np.float64 if table.dtype == "float64" else np.float32
    out = np.zeros((len(keys), table.dim), compute)
    if table.init.kind != "zeros":
        seed_key = np.uint64(fold(table.seed))
        multiplier = compute(multiplier_of(table.init))
        _fill(keys, seed_key, table.dim, multiplier, table.init.kind == "normal", out)
    return torch.from_numpy(out).to(table.weight_dtype)


def initial_vectors_torch(keys: torch.Tensor, table: TableConfig) -> torch.Tensor:
    """Return the values of `initial_vectors`, computed with torch integer operations on the device of `keys`."""
    compute = table.state_dtype
    out = torch.zeros(len(keys), table.dim, dtype=compute, device=keys.device)
    if table.init.kind != "zeros":
        multiplier = torch.full((), multiplier_of(table.init), dtype=compute, device=keys.device)
        elements = torch.arange(table.dim, device=keys.device)
        for start in range(0, len(keys), _CHUNK_ROWS):
            rows = slice(start, start + _CHUNK_ROWS)
            base = _mix64_torch(keys[rows] ^ _signed(fold(table.seed)))
            centered = _centered_torch(_mix64_torch(base[:, None] ^ elements), table.init.kind == "normal")
            out[rows] = centered.to(compute) * multiplier
    return out.to(table.weight_dtype)


def initial_rows(keys: NDArray[np.int64], table: TableConfig, layout: RowLayout, device: torch.device) -> torch.Tensor:
    """Return (n, num_words) new rows: initial vector and initial optimizer state."""
    rows = torch.zeros(len(keys), layout.num_words, dtype=torch.int32, device=device)
    if device.type == "cpu":
        vectors = initial_vectors(keys, table)
    else:
        vectors = initial_vectors_torch(to_device(keys, device), table)
    layout.view(rows, "weight").copy_(vectors)
    for column in layout.columns[1:]:
        if column.initial:
            layout.view(rows, column.name).fill_(column.initial)
    return rows


def _centered_torch(hashes: torch.Tensor, is_normal: bool) -> torch.Tensor:
    if not is_normal:
        return ((hashes >> 40) & 0xFFFFFF) - 8388608
    lanes = (hashes & 0xFFFF) + ((hashes >> 16) & 0xFFFF) + ((hashes >> 32) & 0xFFFF) + ((hashes >> 48) & 0xFFFF)
    return lanes - 131070


def _mix64_torch(x: torch.Tensor) -> torch.Tensor:
    x = x + _signed(GOLDEN64)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(MULTIPLIERS64[0])
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(MULTIPLIERS64[1])
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
