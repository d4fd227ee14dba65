"""Device memory of the prefix cache: keys and values of every layer in pages, and what stands beside them.

Keys and values may be kept in fewer bits than the model computes in. In 8 bits (float8_e4m3fn) a token has in each
head a power of two for its key and one for its value; docs/decisions/kept-prefixes.md says why.

Legend: L layers, H heads, D head dimension, P tokens, N pages, B bytes of a page.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.errors import UserError
from nestrec.models.sequence import KeysAndValues, KVCacheSpec, PagedKVCache
from nestrec.serving.model.servable import Servable

PrefixDtype = Literal["model", "bfloat16", "fp8"]
"""of keys and values: that of the model's computation, or one of fewer bits"""
_LARGEST_FP8 = 448.0
_MOST_EXPONENT = 134
"""of the power of two of a token, as float32 has it: kernels multiply it by 2^120 in bfloat16. What is above 448 * 2^7
is cut off"""


def kept_dtype(choice: PrefixDtype, model: torch.dtype) -> torch.dtype:
    """In which keys and values are kept."""
    return {"model": model, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[choice]


def bytes_a_token(kept: KVCacheSpec, dtype: torch.dtype, *, has_times: bool = False) -> int:
    """Of all that is kept of a token, over all layers."""
    numbers = 2 * kept.num_layers * kept.num_heads
    scales = numbers if dtype == torch.float8_e4m3fn else 0
    return max(1, numbers * kept.head_dim * dtype.itemsize + scales + (8 if has_times else 0))


@contextlib.contextmanager
def naming_memory(field: str, num_bytes: int, remedy: str) -> Iterator[None]:
    """Say which option asked for memory that there is not."""
    try:
        yield
    except RuntimeError as error:  # torch has no class of its own for host memory
        raise UserError("is more memory than can be had", option=field, value=num_bytes, remedy=remedy) from error


class PagePool:
    """(L, 2, H, slots, D), allocated once."""

    def __init__(
        self,
        kept: KVCacheSpec,
        *,
        num_pages: int,
        page_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        prefix_dtype: PrefixDtype = "model",
        has_times: bool = False,
    ):
        """dtype: of the model. has_times: when tokens happened is kept beside them, for a model that reads times."""
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._dtype = dtype
        num_slots = num_pages * page_tokens
        own = kept_dtype(prefix_dtype, dtype)
        shape = (kept.num_layers, 2, kept.num_heads, num_slots, kept.head_dim)
        self.token_bytes = bytes_a_token(kept, own, has_times=has_times)
        remedy = "give less; while a model is swapped, the caches of the old and the new one are there"
        with naming_memory("tiers.cache_bytes", num_slots * self.token_bytes, remedy):
            # Not filled: on a CPU, memory is then taken as pages come into use.
            self._pool = torch.empty(shape, device=device, dtype=own)
            is_small = own == torch.float8_e4m3fn
            self._scales = torch.empty(shape[:-1], device=device, dtype=torch.uint8) if is_small else None
            self._times = torch.empty(num_slots, device=device, dtype=torch.float64) if has_times else None
        self.host_slabs: dict[tuple[int, int], torch.Tensor] = {}
        """host memory behind it, by number and pages: kept for the next engine that uses the pool"""

    @property
    def tensor(self) -> torch.Tensor:
        """(L, 2, H, slots, D)"""
        return self._pool

    @property
    def kept_pages(self) -> PagedKVCache:
        """As kernels take it."""
        return PagedKVCache(pool=self._pool, scales=self._scales, times=self._times, page_tokens=self.page_tokens)

    def read(self, layer: int, pages: list[int], length: int) -> KeysAndValues:
        """The first `length` tokens in these pages: (H, P, D) each, to be used before the pages change hands."""
        if _are_in_a_row(pages):
            first = pages[0] * self.page_tokens if pages else 0
            where: slice | torch.Tensor = slice(first, first + length)
        else:
            where = self._slots(pages, 0, length)
        found = []
        for part in range(2):
            own = _taken(self._pool[layer, part], where).to(self._dtype)
            if self._scales is not None:
                own = own * _powers(_taken(self._scales[layer, part], where))[:, :, None].to(self._dtype)
            found.append(own)
        return found[0], found[1]

    def write(self, layer: int, pages: list[int], first: int, keys_THD: torch.Tensor, values_THD: torch.Tensor) -> None:
        """Tokens from `first` on."""
        slots = self._slots(pages, first, first + len(keys_THD))
        for part, new in ((0, keys_THD), (1, values_THD)):
            new_HTD = new.transpose(0, 1)
            if self._scales is not None:
                exponent_HT = _exponents(new_HTD)
                self._scales[layer, part].index_copy_(1, slots, exponent_HT)
                new_HTD = (new_HTD.float() / _powers(exponent_HT)[:, :, None]).clamp(-_LARGEST_FP8, _LARGEST_FP8)
                # Bytes: torch copies numbers of 8 bits by index on no device.
                bits = new_HTD.to(torch.float8_e4m3fn).view(torch.uint8)
                self._pool[layer, part].view(torch.uint8).index_copy_(1, slots, bits)
            else:
                self._pool[layer, part].index_copy_(1, slots, new_HTD.to(self._pool.dtype))

    @property
    def page_bytes(self) -> int:
        """Of all layers, and of what stands beside them."""
        return self.page_tokens * self.token_bytes

    def empty_blocks(self, count: int) -> torch.Tensor:
        """(N, B) uint8: room for so many pages."""
        return self._pool.new_empty(count, self.page_bytes, dtype=torch.uint8)

    def gather(self, pages: Sequence[int]) -> torch.Tensor:
        """(N, B) uint8: a copy of whole pages."""
        numbers = self._numbers(pages)
        blocks = self.empty_blocks(len(pages))
        for view, first, end in self._planes():
            blocks[:, first:end] = view.index_select(0, numbers).flatten(1)
        return blocks

    def scatter(self, pages: Sequence[int], blocks: torch.Tensor) -> None:
        """Whole pages from (N, B)."""
        numbers = self._numbers(pages)
        for view, first, end in self._planes():
            view.index_copy_(0, numbers, blocks[:, first:end].reshape(len(pages), *view.shape[1:]))

    def slots(self, pages: list[int], first: int, end: int) -> NDArray[np.int64]:
        """Where tokens [first, end) of these pages lie."""
        skipped = first // self.page_tokens
        used = np.asarray(pages[skipped : -(-end // self.page_tokens)], np.int64)
        slots: NDArray[np.int64] = (used[:, None] * self.page_tokens + np.arange(self.page_tokens)).ravel()
        return slots[first - skipped * self.page_tokens : end - skipped * self.page_tokens]

    def _planes(self) -> Iterator[tuple[torch.Tensor, int, int]]:
        """((N, ...) bytes of each page, where they begin and end in a block) of everything that a page has."""
        begin = 0
        for plane, axis in ((self._pool, 3), (self._scales, 3), (self._times, 0)):
            if plane is None:
                continue
            view = plane.unflatten(axis, (self.num_pages, self.page_tokens)).movedim(axis, 0).view(torch.uint8)
            size = math.prod(view.shape[1:])
            yield view, begin, begin + size
            begin += size

    def _numbers(self, pages: Sequence[int]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int64).to(self._pool.device)

    def _slots(self, pages: list[int], first: int, end: int) -> torch.Tensor:
        return torch.from_numpy(self.slots(pages, first, end)).to(self._pool.device)


def pool_for(
    servable: Servable,
    *,
    cache_bytes: int,
    page_tokens: int,
    prefix_dtype: PrefixDtype = "model",
    device: torch.device | None = None,
) -> PagePool:
    """As many pages of a model's prefixes as there are bytes for, one at the least. device: where it is not that of the
    model."""
    own = kept_dtype(prefix_dtype, servable.dtype)
    token_bytes = bytes_a_token(servable.kept, own, has_times=servable.reads_times)
    return PagePool(
        servable.kept,
        num_pages=max(1, cache_bytes // (token_bytes * page_tokens)),
        page_tokens=page_tokens,
        device=device or servable.device,
        dtype=servable.dtype,
        prefix_dtype=prefix_dtype,
        has_times=servable.reads_times,
    )


def _are_in_a_row(pages: list[int]) -> bool:
    return all(b == a + 1 for a, b in itertools.pairwise(pages))


def _taken(plane: torch.Tensor, where: slice | torch.Tensor) -> torch.Tensor:
    """Some slots of (H, slots, ...)."""
    if isinstance(where, slice):
        return plane[:, where]
    if plane.dtype == torch.float8_e4m3fn:
        return plane.view(torch.uint8).index_select(1, where).view(plane.dtype)
    return plane.index_select(1, where)


def _exponents(x_HTD: torch.Tensor) -> torch.Tensor:
    """(H, T) uint8: of the least power of two that leaves nothing above the largest number of 8 bits."""
    bits = (x_HTD.float().abs().amax(2) / _LARGEST_FP8).view(torch.int32)
    return ((bits + 0x7FFFFF) >> 23).clamp(1, _MOST_EXPONENT).to(torch.uint8)


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    return (exponents.to(torch.int32) << 23).view(torch.float32)
