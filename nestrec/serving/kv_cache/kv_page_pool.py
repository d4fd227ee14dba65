"""Paged KV cache: device memory for keys and values of all layers in pages, with scales and event times.

The page list of a cache entry is what vLLM calls a block table. Keys and values may be stored with lower precision than
the model computes in. In 8 bits (float8_e4m3fn), each token has one power-of-two scale per head for its key and one for
its value; docs/decisions/prefix-kv-cache.md explains why.

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

KVCacheDtype = Literal["model", "bfloat16", "fp8"]
"""Data type of the KV cache: that of the model's computation, or one of lower precision."""
_MAX_FP8 = 448.0
_MAX_EXPONENT = 134
"""Maximum biased float32 exponent of a token's scale, because kernels multiply the scale by 2^120 in bfloat16. Values
above 448 * 2^7 are clipped."""


def resolve_kv_dtype(choice: KVCacheDtype, model: torch.dtype) -> torch.dtype:
    """Return the data type of the KV cache for a choice and the model's data type."""
    return {"model": model, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[choice]


def bytes_per_token(spec: KVCacheSpec, dtype: torch.dtype, *, has_times: bool = False) -> int:
    """Return the bytes of one token in the KV cache, over all layers, including scales and event time."""
    num_vectors = 2 * spec.num_layers * spec.num_heads
    scales = num_vectors if dtype == torch.float8_e4m3fn else 0
    return max(1, num_vectors * spec.head_dim * dtype.itemsize + scales + (8 if has_times else 0))


@contextlib.contextmanager
def name_memory_option(option: str, num_bytes: int, remedy: str) -> Iterator[None]:
    """Convert a failed allocation into a `UserError` that names the option that sets the size."""
    try:
        yield
    except RuntimeError as error:  # PyTorch has no exception class for a failed allocation of host memory
        raise UserError("exceeds the available memory", option=option, value=num_bytes, remedy=remedy) from error


class PagePool:
    """Pages of the KV cache: a (L, 2, H, slots, D) tensor, allocated once. An entry's page list is its block table."""

    def __init__(
        self,
        spec: KVCacheSpec,
        *,
        num_pages: int,
        page_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        kv_cache_dtype: KVCacheDtype = "model",
        has_times: bool = False,
    ):
        """Allocate the pages.

        Args:
            spec: Layout of the KV cache.
            num_pages: Number of pages.
            page_tokens: Tokens per page.
            device: Device of the pages.
            dtype: Data type of the model.
            kv_cache_dtype: Data type of the KV cache.
            has_times: Whether to store the event time of each token, for models that read times.

        Raises:
            UserError: The device has too little memory.
        """
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._dtype = dtype
        num_slots = num_pages * page_tokens
        stored_dtype = resolve_kv_dtype(kv_cache_dtype, dtype)
        shape = (spec.num_layers, 2, spec.num_heads, num_slots, spec.head_dim)
        self.token_bytes = bytes_per_token(spec, stored_dtype, has_times=has_times)
        remedy = "set a smaller value; during a model swap, the caches of the old and the new model exist"
        with name_memory_option("service.engine.prefix_cache.device_bytes", num_slots * self.token_bytes, remedy):
            # Uninitialized, so that a CPU allocates memory only when pages are used.
            self._pool = torch.empty(shape, device=device, dtype=stored_dtype)
            has_scales = stored_dtype == torch.float8_e4m3fn
            self._scales = torch.empty(shape[:-1], device=device, dtype=torch.uint8) if has_scales else None
            self._times = torch.empty(num_slots, device=device, dtype=torch.float64) if has_times else None
        self.host_slabs: dict[tuple[int, int], torch.Tensor] = {}
        """Slabs of the host tier by slab number and number of pages; the next engine with this pool reuses them."""

    @property
    def tensor(self) -> torch.Tensor:
        """Keys and values with shape (L, 2, H, slots, D)."""
        return self._pool

    @property
    def paged_kv_cache(self) -> PagedKVCache:
        """The KV cache in the form that kernels read."""
        return PagedKVCache(pool=self._pool, scales=self._scales, times=self._times, page_tokens=self.page_tokens)

    def read(self, layer: int, pages: list[int], length: int) -> KeysAndValues:
        """Return (H, P, D) keys and values of the first `length` tokens in these pages.

        They may be views, and are valid until the pages are assigned to another entry.
        """
        if _are_contiguous(pages):
            first = pages[0] * self.page_tokens if pages else 0
            slots: slice | torch.Tensor = slice(first, first + length)
        else:
            slots = self._slots(pages, 0, length)
        keys_and_values = []
        for part in range(2):
            stored = _select(self._pool[layer, part], slots).to(self._dtype)
            if self._scales is not None:
                stored = stored * _powers(_select(self._scales[layer, part], slots))[:, :, None].to(self._dtype)
            keys_and_values.append(stored)
        return keys_and_values[0], keys_and_values[1]

    def write(self, layer: int, pages: list[int], first: int, keys_THD: torch.Tensor, values_THD: torch.Tensor) -> None:
        """Write keys and values of the tokens from `first` on."""
        slots = self._slots(pages, first, first + len(keys_THD))
        for part, new in ((0, keys_THD), (1, values_THD)):
            new_HTD = new.transpose(0, 1)
            if self._scales is not None:
                exponent_HT = _exponents(new_HTD)
                self._scales[layer, part].index_copy_(1, slots, exponent_HT)
                new_HTD = (new_HTD.float() / _powers(exponent_HT)[:, :, None]).clamp(-_MAX_FP8, _MAX_FP8)
                # Copied as bytes, because PyTorch does not support index_copy_ of 8-bit floats on any device.
                bits = new_HTD.to(torch.float8_e4m3fn).view(torch.uint8)
                self._pool[layer, part].view(torch.uint8).index_copy_(1, slots, bits)
            else:
                self._pool[layer, part].index_copy_(1, slots, new_HTD.to(self._pool.dtype))

    @property
    def page_bytes(self) -> int:
        """Bytes per page, over all layers, including scales and event times."""
        return self.page_tokens * self.token_bytes

    def empty_blocks(self, count: int) -> torch.Tensor:
        """Return an uninitialized (N, B) uint8 buffer for `count` pages."""
        return self._pool.new_empty(count, self.page_bytes, dtype=torch.uint8)

    def gather(self, pages: Sequence[int]) -> torch.Tensor:
        """Return a copy of complete pages as (N, B) uint8."""
        numbers = self._numbers(pages)
        blocks = self.empty_blocks(len(pages))
        for view, first, end in self._planes():
            blocks[:, first:end] = view.index_select(0, numbers).flatten(1)
        return blocks

    def scatter(self, pages: Sequence[int], blocks: torch.Tensor) -> None:
        """Overwrite complete pages with (N, B) uint8 blocks."""
        numbers = self._numbers(pages)
        for view, first, end in self._planes():
            view.index_copy_(0, numbers, blocks[:, first:end].reshape(len(pages), *view.shape[1:]))

    def slots(self, pages: list[int], first: int, end: int) -> NDArray[np.int64]:
        """Return the slots of tokens [first, end) of these pages."""
        skipped = first // self.page_tokens
        used = np.asarray(pages[skipped : -(-end // self.page_tokens)], np.int64)
        slots: NDArray[np.int64] = (used[:, None] * self.page_tokens + np.arange(self.page_tokens)).ravel()
        return slots[first - skipped * self.page_tokens : end - skipped * self.page_tokens]

    def _planes(self) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Iterate over the tensors of a page: (N, ...) bytes of each page, and their start and end in a block."""
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
    kv_cache_dtype: KVCacheDtype = "model",
    device: torch.device | None = None,
) -> PagePool:
    """Return a page pool of at most `cache_bytes`, but at least one page, for a model.

    Args:
        servable: Model whose keys and values are cached.
        cache_bytes: Maximum bytes of the pool.
        page_tokens: Tokens per page.
        kv_cache_dtype: Data type of the KV cache.
        device: Device of the pool; that of the model by default.
    """
    stored_dtype = resolve_kv_dtype(kv_cache_dtype, servable.dtype)
    token_bytes = bytes_per_token(servable.cache_spec, stored_dtype, has_times=servable.reads_times)
    return PagePool(
        servable.cache_spec,
        num_pages=max(1, cache_bytes // (token_bytes * page_tokens)),
        page_tokens=page_tokens,
        device=device or servable.device,
        dtype=servable.dtype,
        kv_cache_dtype=kv_cache_dtype,
        has_times=servable.reads_times,
    )


def _are_contiguous(pages: list[int]) -> bool:
    return all(b == a + 1 for a, b in itertools.pairwise(pages))


def _select(plane: torch.Tensor, slots: slice | torch.Tensor) -> torch.Tensor:
    """Select slots of a (H, slots, ...) tensor."""
    if isinstance(slots, slice):
        return plane[:, slots]
    if plane.dtype == torch.float8_e4m3fn:
        return plane.view(torch.uint8).index_select(1, slots).view(plane.dtype)
    return plane.index_select(1, slots)


def _exponents(x_HTD: torch.Tensor) -> torch.Tensor:
    """Return (H, T) uint8 exponents of the smallest power-of-two scales with which no value exceeds the fp8 maximum."""
    bits = (x_HTD.float().abs().amax(2) / _MAX_FP8).view(torch.int32)
    return ((bits + 0x7FFFFF) >> 23).clamp(1, _MAX_EXPONENT).to(torch.uint8)


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    return (exponents.to(torch.int32) << 23).view(torch.float32)
