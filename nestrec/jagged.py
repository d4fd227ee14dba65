"""The one value type for jagged data: concatenated values and the offsets of the rows.

The one value type for jagged data, with conversions to torch.nested and TorchRec's KeyedJaggedTensor.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import ArrayLike

from nestrec.base.errors import UserError

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor


@dataclass(frozen=True, slots=True)
class Jagged:
    """Rows of different lengths: row b is `values[offsets[b]:offsets[b + 1]]`.

    values: (T, ...) any dtype. offsets: (B + 1,) int64, on the same device, from 0 to T, never decreasing.
    """

    values: torch.Tensor
    offsets: torch.Tensor

    @staticmethod
    def from_rows(rows: Iterable[torch.Tensor | ArrayLike]) -> "Jagged":
        """Of rows that are tensors, arrays or lists of numbers, each (length, ...) and any of them empty; copied.

        The type is that of the rows that hold something: `torch.tensor([])` among whole numbers leaves them whole.
        """
        given = [torch.as_tensor(row) for row in rows]
        for number, row in enumerate(given):
            if row.dim() == 0:
                remedy = "give a row of values for each sample, such as [[3, 8], [], [5]]"
                raise UserError("is one value and no row", option=f"rows[{number}]", value=row.item(), remedy=remedy)
        lengths = torch.tensor([len(row) for row in given], dtype=torch.int64)
        filled = [row for row in given if len(row)] or given
        values = torch.cat(filled) if filled else torch.empty(0)
        return Jagged(values, offsets_of(lengths).to(values.device))

    @property
    def num_rows(self) -> int:
        """B."""
        return self.offsets.numel() - 1

    @property
    def num_values(self) -> int:
        """T, over all rows."""
        return self.values.shape[0]

    def lengths(self) -> torch.Tensor:
        """(B,) number of values of each row."""
        return self.offsets.diff()

    def row_of_value(self) -> torch.Tensor:
        """(T,) row index of each value."""
        rows = torch.arange(self.num_rows, device=self.offsets.device)
        return torch.repeat_interleave(rows, self.lengths(), output_size=self.num_values)

    def position_of_value(self) -> torch.Tensor:
        """(T,) position of each value inside its row, from 0."""
        return torch.arange(self.num_values, device=self.offsets.device) - self.offsets[:-1][self.row_of_value()]

    def with_values(self, values: torch.Tensor) -> "Jagged":
        """The same rows with other values."""
        assert values.shape[0] == self.num_values
        return Jagged(values, self.offsets)

    def rows(self) -> list[torch.Tensor]:
        """Each row as a view of the values; on a GPU the host waits for the offsets."""
        return [self.values[a:b] for a, b in zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist(), strict=True)]

    def take(self, rows: torch.Tensor) -> "Jagged":
        """Some of the rows, in the order of their numbers."""
        lengths = self.lengths()[rows]
        offsets = offsets_of(lengths)
        shift = torch.repeat_interleave(self.offsets[:-1][rows] - offsets[:-1], lengths)
        return Jagged(self.values[torch.arange(len(shift), device=shift.device) + shift], offsets)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Jagged":
        """The same on a device."""
        return Jagged(
            self.values.to(device, non_blocking=non_blocking), self.offsets.to(device, non_blocking=non_blocking)
        )

    def to_padded(self, max_length: int, padding: float = 0.0) -> torch.Tensor:
        """(B, max_length, ...) with `padding` behind the end of each row; longer rows are an error."""
        assert self.num_rows == 0 or int(self.lengths().max()) <= max_length
        padded = self.values.new_full((self.num_rows, max_length, *self.values.shape[1:]), padding)
        padded[self.row_of_value(), self.position_of_value()] = self.values
        return padded

    @staticmethod
    def from_padded(padded: torch.Tensor, lengths: torch.Tensor) -> "Jagged":
        """The valid part of (B, N, ...)."""
        mask = torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]
        return Jagged(padded[mask], offsets_of(lengths))

    def to_nested(self) -> torch.Tensor:
        """A nested tensor (layout torch.jagged) of the same memory."""
        return torch.nested.nested_tensor_from_jagged(self.values, self.offsets)

    @staticmethod
    def from_nested(nested: torch.Tensor) -> "Jagged":
        """Of a nested tensor with layout torch.jagged; the same memory."""
        assert nested.layout == torch.jagged
        jagged: Any = nested  # its class is private to torch
        assert jagged.lengths() is None, "a view with holes between its rows; make it contiguous first"
        return Jagged(jagged.values(), jagged.offsets())


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    """(B,) lengths to (B + 1,) int64 offsets."""
    return torch.nn.functional.pad(lengths.to(torch.int64).cumsum(0), (1, 0))


def to_keyed_jagged(features: dict[str, Jagged]) -> "KeyedJaggedTensor":
    """TorchRec's KeyedJaggedTensor of several features over the same rows."""
    from torchrec import KeyedJaggedTensor

    return KeyedJaggedTensor(
        keys=list(features),
        values=torch.cat([f.values for f in features.values()]),
        lengths=torch.cat([f.lengths() for f in features.values()]),
    )


def from_keyed_jagged(keyed: "KeyedJaggedTensor") -> dict[str, Jagged]:
    """The features of TorchRec's KeyedJaggedTensor."""
    return {name: Jagged(part.values(), part.offsets().to(torch.int64)) for name, part in keyed.to_dict().items()}


__all__ = ["Jagged", "from_keyed_jagged", "offsets_of", "to_keyed_jagged"]
