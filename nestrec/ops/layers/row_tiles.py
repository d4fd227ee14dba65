"""How row kernels cut matrices into tiles, and what they refuse."""

from collections.abc import Sequence
from typing import Any

import torch

from nestrec.base.errors import UserError
from nestrec.ops.kernel_op import power_of_two

ROW_TILE = 1024
"""Elements of a program that needs whole rows: one 16-byte load a thread of four warps, many programs in flight."""
PART_TILE = 4096
"""Elements of an elementwise program."""


def row_tile(width: int, parts: int = 1) -> dict[str, Any]:
    """Whole rows of `parts` matrices."""
    block = power_of_two(width)
    return {"WIDTH": width, "BLOCK": block, "ROWS": _rows(block, parts), "num_warps": 4 if block <= 1024 else 8}


def row_grid(x: torch.Tensor, parts: int = 1) -> tuple[int]:
    return (max(1, -(-len(x) // _rows(power_of_two(x.shape[1]), parts))),)


def part_tile(width: int) -> dict[str, Any]:
    """Parts of rows of at most 1024 channels."""
    block = min(1024, power_of_two(width))
    return {"WIDTH": width, "BLOCK": block, "ROWS": max(1, PART_TILE // block), "num_warps": 8}


def part_grid(x: torch.Tensor) -> tuple[int, int]:
    block = min(1024, power_of_two(x.shape[1]))
    return (max(1, -(-len(x) // max(1, PART_TILE // block))), -(-x.shape[1] // block))


def _rows(block: int, parts: int) -> int:
    return max(1, ROW_TILE // (block * power_of_two(parts)))


def check_rows(*rows: torch.Tensor | None) -> None:
    """Packed matrices; callers make them so, and what is not is refused."""
    for x in rows:
        if x is not None and (x.dim() != 2 or not x.is_contiguous()):
            raise UserError(
                "the kernel reads packed (tokens, channels) matrices",
                field="shape, strides",
                value=(tuple(x.shape), x.stride()),
                remedy="call .contiguous() first",
            )


def check_strided(*rows: torch.Tensor) -> None:
    """Matrices whose channels lie side by side; their rows may be apart."""
    for x in rows:
        if x.dim() != 2 or (x.shape[1] > 1 and x.stride(1) != 1):
            raise UserError(
                "the channels of a token must lie side by side",
                field="shape, strides",
                value=(tuple(x.shape), x.stride()),
                remedy="call .contiguous() first",
            )


def check_parts(parts: Sequence[torch.Tensor], gate: torch.Tensor) -> None:
    """What a gate is laid on."""
    check_strided(*parts, gate)
    widths = [x.shape[1] for x in parts]
    if not 1 <= len(parts) <= 3 or len(set(widths)) > 1 or sum(widths) != gate.shape[1]:
        raise UserError(
            "one to three parts of one width, together as wide as the gate", field="widths", value=(widths, gate.shape)
        )


def like(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Packed memory of the shape of `x`."""
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


def column(x: torch.Tensor) -> torch.Tensor:
    """A float32 for each row."""
    return torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
