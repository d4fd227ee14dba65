"""Tables of 8 bits with a scale for each row: the numbers of a row, then the four bytes of its scale.

    row = scale * (int8 or float8_e4m3fn numbers),   scale = largest of the row / largest of the format

A row is bytes like any other, so stores and caches carry it as it is; it becomes numbers when it is looked up.

Legend: N rows, D numbers of a row.
"""

from collections.abc import Iterator
from typing import Literal

import torch

from nestrec.serving.model.tables import ServedTable

PackedKind = Literal["int8", "fp8"]
"""also the name of the tensor in an exported file"""
PACKED_KINDS: tuple[PackedKind, ...] = ("int8", "fp8")
_LARGEST = {"int8": 127.0, "fp8": 448.0}
_SCALE_BYTES = 4
_PART_ROWS = 1 << 16


def packed_width(dim: int) -> int:
    """Bytes of a row."""
    return dim + _SCALE_BYTES


def packed_rows(rows_ND: torch.Tensor, kind: PackedKind) -> torch.Tensor:
    """(N, D + 4) uint8"""
    rows_ND = rows_ND.float()
    scale_N1 = rows_ND.abs().amax(1, keepdim=True) / _LARGEST[kind]
    scale_N1 = torch.where(scale_N1 > 0, scale_N1, 1.0)
    small = rows_ND / scale_N1
    if kind == "int8":
        numbers = small.round().to(torch.int8).view(torch.uint8)
    else:
        numbers = small.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat([numbers, scale_N1.view(torch.uint8)], dim=1)


def unpacked_rows(bytes_NB: torch.Tensor, kind: PackedKind) -> torch.Tensor:
    """(N, D) float32"""
    numbers = bytes_NB[:, :-_SCALE_BYTES]
    scale_N1 = bytes_NB[:, -_SCALE_BYTES:].contiguous().view(torch.float32)
    return numbers.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn).float() * scale_N1


class PackedTable:
    """Numbers over a table of bytes, which lies wherever tables lie."""

    def __init__(self, packed: ServedTable, kind: PackedKind):
        self.packed, self.kind = packed, kind

    @property
    def num_rows(self) -> int:
        return self.packed.num_rows

    @num_rows.setter
    def num_rows(self, count: int) -> None:
        self.packed.num_rows = count

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return unpacked_rows(self.packed.rows(ids), self.kind)

    def parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        for first, part in self.packed.parts():
            for start in range(0, len(part), _PART_ROWS):
                yield first + start, unpacked_rows(part[start : start + _PART_ROWS], self.kind)

    @property
    def room(self) -> int:
        return self.packed.room

    @property
    def row_device(self) -> torch.device:
        return self.packed.row_device

    def put(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self.packed.put(ids, packed_rows(rows, self.kind))

    def statistics(self) -> dict[str, int]:
        return self.packed.statistics()
