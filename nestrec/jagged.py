"""Jagged tensors: concatenated values and row offsets. Converts to torch.nested and TorchRec's KeyedJaggedTensor."""

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
    """A jagged tensor: rows of different lengths; row b is `values[offsets[b]:offsets[b + 1]]`.

    Attributes:
        values: (T, ...) values of any dtype.
        offsets: (B + 1,) int64 offsets on the same device, from 0 to T, non-decreasing.

    Example:
        >>> Jagged.from_rows([[3, 8], [], [5]]).offsets
        tensor([0, 2, 2, 3])
    """

    values: torch.Tensor
    offsets: torch.Tensor

    @staticmethod
    def from_rows(rows: Iterable[torch.Tensor | ArrayLike]) -> "Jagged":
        """Build a jagged tensor from rows, which are copied.

        Args:
            rows: Tensors, arrays or lists of numbers, each of shape (length, ...), possibly empty. The dtype is that of
                the non-empty rows: an empty `torch.tensor([])` among integer rows does not convert them to float.

        Raises:
            UserError: If a row is a single value.
        """
        tensors = [torch.as_tensor(row) for row in rows]
        for number, row in enumerate(tensors):
            if row.dim() == 0:
                remedy = "pass a row of values for each sample, such as [[3, 8], [], [5]]"
                raise UserError("must be a row, not a value", option=f"rows[{number}]", value=row.item(), remedy=remedy)
        lengths = torch.tensor([len(row) for row in tensors], dtype=torch.int64)
        non_empty = [row for row in tensors if len(row)] or tensors
        values = torch.cat(non_empty) if non_empty else torch.empty(0)
        return Jagged(values, offsets_of(lengths).to(values.device))

    @property
    def num_rows(self) -> int:
        """Number of rows, B."""
        return self.offsets.numel() - 1

    @property
    def num_values(self) -> int:
        """Number of values over all rows, T."""
        return self.values.shape[0]

    def lengths(self) -> torch.Tensor:
        """Return the (B,) number of values of each row."""
        return self.offsets.diff()

    def row_of_value(self) -> torch.Tensor:
        """Return the (T,) row index of each value."""
        rows = torch.arange(self.num_rows, device=self.offsets.device)
        return torch.repeat_interleave(rows, self.lengths(), output_size=self.num_values)

    def position_of_value(self) -> torch.Tensor:
        """Return the (T,) position of each value inside its row, from 0."""
        return torch.arange(self.num_values, device=self.offsets.device) - self.offsets[:-1][self.row_of_value()]

    def with_values(self, values: torch.Tensor) -> "Jagged":
        """Return a jagged tensor with the same offsets and other values."""
        assert values.shape[0] == self.num_values
        return Jagged(values, self.offsets)

    def rows(self) -> list[torch.Tensor]:
        """Return each row as a view of the values; on a GPU this synchronizes with the device."""
        return [self.values[a:b] for a, b in zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist(), strict=True)]

    def take(self, rows: torch.Tensor) -> "Jagged":
        """Return the rows with these indices, in this order."""
        lengths = self.lengths()[rows]
        offsets = offsets_of(lengths)
        shift = torch.repeat_interleave(self.offsets[:-1][rows] - offsets[:-1], lengths)
        return Jagged(self.values[torch.arange(len(shift), device=shift.device) + shift], offsets)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Jagged":
        """Copy the tensor to a device."""
        return Jagged(
            self.values.to(device, non_blocking=non_blocking), self.offsets.to(device, non_blocking=non_blocking)
        )

    def to_padded(self, max_length: int, padding: float = 0.0) -> torch.Tensor:
        """Return a (B, max_length, ...) tensor with `padding` after the end of each row; no row may be longer."""
        assert self.num_rows == 0 or int(self.lengths().max()) <= max_length
        padded = self.values.new_full((self.num_rows, max_length, *self.values.shape[1:]), padding)
        padded[self.row_of_value(), self.position_of_value()] = self.values
        return padded

    @staticmethod
    def from_padded(padded: torch.Tensor, lengths: torch.Tensor) -> "Jagged":
        """Build a jagged tensor from the valid part of a padded tensor (B, N, ...)."""
        mask = torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]
        return Jagged(padded[mask], offsets_of(lengths))

    def to_nested(self) -> torch.Tensor:
        """Return a nested tensor (layout torch.jagged) that shares the memory."""
        return torch.nested.nested_tensor_from_jagged(self.values, self.offsets)

    @staticmethod
    def from_nested(nested: torch.Tensor) -> "Jagged":
        """Build a jagged tensor from a nested tensor with layout torch.jagged, sharing its memory."""
        assert nested.layout == torch.jagged
        jagged: Any = nested  # torch.nested.NestedTensor is a private class
        assert jagged.lengths() is None, "the nested tensor has gaps between its rows; make it contiguous first"
        return Jagged(jagged.values(), jagged.offsets())


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    """Convert (B,) lengths to (B + 1,) int64 offsets."""
    return torch.nn.functional.pad(lengths.to(torch.int64).cumsum(0), (1, 0))


def to_keyed_jagged(features: dict[str, Jagged]) -> "KeyedJaggedTensor":
    """Convert features over the same rows to TorchRec's KeyedJaggedTensor."""
    from torchrec import KeyedJaggedTensor

    return KeyedJaggedTensor(
        keys=list(features),
        values=torch.cat([f.values for f in features.values()]),
        lengths=torch.cat([f.lengths() for f in features.values()]),
    )


def from_keyed_jagged(keyed: "KeyedJaggedTensor") -> dict[str, Jagged]:
    """Convert TorchRec's KeyedJaggedTensor to one jagged tensor per feature."""
    return {
        name: Jagged(feature.values(), feature.offsets().to(torch.int64)) for name, feature in keyed.to_dict().items()
    }


__all__ = ["Jagged", "from_keyed_jagged", "offsets_of", "to_keyed_jagged"]
