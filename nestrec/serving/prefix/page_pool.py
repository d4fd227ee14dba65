"""Device memory of the prefix cache: keys and values of every layer, in pages.

Legend: L layers, H heads, D head dimension, P tokens, N pages.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.errors import UserError
from nestrec.models.segments import KeptShape, KeysAndValues


def bytes_a_token(kept: KeptShape, dtype: torch.dtype) -> int:
    """Keys and values of a token over all layers."""
    return 2 * kept.num_layers * kept.num_heads * kept.head_dim * dtype.itemsize


@contextlib.contextmanager
def naming_memory(field: str, num_bytes: int, remedy: str) -> Iterator[None]:
    """Say which option asked for memory that there is not."""
    try:
        yield
    except RuntimeError as error:  # torch has no class of its own for host memory
        raise UserError("is more memory than can be had", field=field, value=num_bytes, remedy=remedy) from error


class PagePool:
    """(L, 2, H, slots, D), allocated once."""

    def __init__(self, kept: KeptShape, *, num_pages: int, page_tokens: int, device: torch.device, dtype: torch.dtype):
        self.num_pages, self.page_tokens = num_pages, page_tokens
        shape = (kept.num_layers, 2, kept.num_heads, num_pages * page_tokens, kept.head_dim)
        remedy = "give less; while a model is swapped, the caches of the old and the new one are there"
        with naming_memory("tiers.cache_bytes", math.prod(shape) * dtype.itemsize, remedy):
            # Not filled: on a CPU, memory is then taken as pages come into use.
            self._pool = torch.empty(shape, device=device, dtype=dtype)
        self.host_slabs: dict[tuple[int, int], torch.Tensor] = {}
        """host memory behind it, by number and pages: kept for the next engine that uses the pool"""

    @property
    def tensor(self) -> torch.Tensor:
        """(L, 2, H, slots, D)"""
        return self._pool

    def read(self, layer: int, pages: list[int], length: int) -> KeysAndValues:
        """The first `length` tokens in these pages: (H, P, D) each, to be used before the pages change hands."""
        if _are_in_a_row(pages):
            first = pages[0] * self.page_tokens if pages else 0
            return self._pool[layer, 0, :, first : first + length], self._pool[layer, 1, :, first : first + length]
        slots = self._slots(pages, 0, length)
        return self._pool[layer, 0].index_select(1, slots), self._pool[layer, 1].index_select(1, slots)

    def write(self, layer: int, pages: list[int], first: int, keys_THD: torch.Tensor, values_THD: torch.Tensor) -> None:
        """Tokens from `first` on."""
        slots = self._slots(pages, first, first + len(keys_THD))
        for part, new in ((0, keys_THD), (1, values_THD)):
            self._pool[layer, part].index_copy_(1, slots, new.transpose(0, 1))

    @property
    def page_bytes(self) -> int:
        """Of all layers."""
        return self._pool.numel() // self.num_pages * self._pool.itemsize

    def empty_blocks(self, count: int) -> torch.Tensor:
        """(N, L, 2, H, P, D): room for so many pages."""
        num_layers, two, num_heads, _, dim = self._pool.shape
        return self._pool.new_empty(count, num_layers, two, num_heads, self.page_tokens, dim)

    def gather(self, pages: Sequence[int]) -> torch.Tensor:
        """(N, L, 2, H, P, D): a copy of whole pages."""
        return self._paged().index_select(3, self._numbers(pages)).permute(3, 0, 1, 2, 4, 5).contiguous()

    def scatter(self, pages: Sequence[int], blocks: torch.Tensor) -> None:
        """Whole pages from (N, L, 2, H, P, D)."""
        self._paged().index_copy_(3, self._numbers(pages), blocks.permute(1, 2, 3, 0, 4, 5))

    def slots(self, pages: list[int], first: int, end: int) -> NDArray[np.int64]:
        """Where tokens [first, end) of these pages lie."""
        skipped = first // self.page_tokens
        used = np.asarray(pages[skipped : -(-end // self.page_tokens)], np.int64)
        slots: NDArray[np.int64] = (used[:, None] * self.page_tokens + np.arange(self.page_tokens)).ravel()
        return slots[first - skipped * self.page_tokens : end - skipped * self.page_tokens]

    def _paged(self) -> torch.Tensor:
        *before, _, dim = self._pool.shape
        return self._pool.view(*before, self.num_pages, self.page_tokens, dim)

    def _numbers(self, pages: Sequence[int]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int64).to(self._pool.device)

    def _slots(self, pages: list[int], first: int, end: int) -> torch.Tensor:
        return torch.from_numpy(self.slots(pages, first, end)).to(self._pool.device)


def _are_in_a_row(pages: list[int]) -> bool:
    return all(b == a + 1 for a, b in itertools.pairwise(pages))
