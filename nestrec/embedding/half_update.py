"""Host loops on rows of 16 bits: they are given some rows at a time as float32, whose weights are then rounded.

Weights are read by bits (bfloat16) or by a table of all 65,536 numbers (float16); state lies behind them as it is.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.ops.rows.round import store_rounded

if TYPE_CHECKING:
    from nestrec.embedding.table import RowLayout

Floats = NDArray[np.float32]
Loop = Callable[[NDArray[Any], NDArray[Any], Sequence[int]], None]
"""A host loop of one step: (rows, gradients, where each state column begins)."""
_ROWS_AT_A_TIME = 1024
"""few enough for a core's own cache"""


def update_half_rows(
    rows: torch.Tensor, grad: torch.Tensor, layout: "RowLayout", draws: torch.Tensor | None, loop: Loop
) -> None:
    """One step on (n, num_words) rows, in place; draws: keys of the random bits, or none to round to nearest."""
    weight, *states = layout.columns
    starts = np.cumsum([column.width for column in layout.columns]).tolist()
    first_state = states[0].offset_bytes // 4 if states else 0
    halves, words = rows.view(torch.int16).numpy().view(np.uint16), rows.view(torch.float32).numpy()
    wide = np.empty((min(len(rows), _ROWS_AT_A_TIME), starts[-1]), np.float32)
    for start in range(0, len(rows), _ROWS_AT_A_TIME):
        part = slice(start, min(start + _ROWS_AT_A_TIME, len(rows)))
        some = wide[: part.stop - start]
        if weight.dtype == torch.bfloat16:
            _widen_bfloat16(halves[part], weight.width, some.view(np.uint32))
        else:
            _widen_float16(halves[part], weight.width, some, _float16_numbers())
        some[:, weight.width :] = words[part, first_state : first_state + starts[-1] - weight.width]
        loop(some, grad[part].numpy(), starts[:-1])
        values, target = torch.from_numpy(some), rows[part].view(weight.dtype)
        if draws is None:
            target[:, : weight.width] = values[:, : weight.width]
        else:
            store_rounded(values, draws[part], target, weight.width)
        words[part, first_state : first_state + starts[-1] - weight.width] = some[:, weight.width :]


@njit(cache=True, nogil=True)
def _widen_bfloat16(halves: NDArray[np.uint16], dim: int, wide: NDArray[np.uint32]) -> None:
    for i in range(len(wide)):
        for j in range(dim):
            wide[i, j] = np.uint32(np.uint32(halves[i, j]) << np.uint32(16))


@njit(cache=True, nogil=True)
def _widen_float16(halves: NDArray[np.uint16], dim: int, wide: Floats, numbers: Floats) -> None:
    for i in range(len(wide)):
        for j in range(dim):
            wide[i, j] = numbers[halves[i, j]]


@lru_cache(maxsize=1)
def _float16_numbers() -> Floats:
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
