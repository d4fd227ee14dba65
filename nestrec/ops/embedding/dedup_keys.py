"""Deduplication of keys on the device: sorted unique keys with the positions of each key.

    keys[rows[i]] = sequence[order[i]],  rows and keys ascending,  order ascending within a key

A stable radix sort groups equal keys; one kernel counts the unique keys that start in each block of sorted keys, and
one numbers them. The result is a pure function of the sequence. There is no device synchronization: outputs have
capacity for as many unique keys as there are positions, and the number of unique keys (`count`) stays on the device
too. Code that needs it on the host (to send keys, or to look them up in a host table) waits when it reads it.

Shapes: P positions.
"""

from dataclasses import dataclass

import torch

from nestrec.ops.kernel_op import HAS_TRITON, kernel_op, runs_triton

_BLOCK = 2048


@dataclass(frozen=True, slots=True)
class SortedUniqueKeys:
    """Unique keys of a sequence and the positions of each; entries from `count` on are undefined."""

    keys_P: torch.Tensor
    """(P,) unique keys in ascending order, in the dtype of the sequence."""
    starts: torch.Tensor
    """(P + 1,) int64 start of each key's positions in `order_P`; entry `count` is P."""
    order_P: torch.Tensor
    """(P,) int64 positions in the sequence, sorted by key."""
    rows_P: torch.Tensor
    """(P,) int32 index of the unique key of each entry of `order_P`."""
    count: torch.Tensor
    """(1,) int64 number of unique keys."""

    def inverse(self) -> torch.Tensor:
        """Return the (P,) int32 inverse indices: the index of the unique key of each position."""
        return torch.empty_like(self.rows_P).scatter_(0, self.order_P, self.rows_P)


def dedup_keys(keys_P: torch.Tensor) -> SortedUniqueKeys:
    """Return the unique keys of an int32 or int64 sequence; int32 keys are sorted twice as fast."""
    return SortedUniqueKeys(*_run(keys_P))


def dedup_keys_reference(keys_P: torch.Tensor) -> SortedUniqueKeys:
    """Reference implementation of `dedup_keys` with `torch.unique`; synchronizes with the device."""
    keys, inverse, counts = torch.unique(keys_P, return_inverse=True, return_counts=True)
    rows_P, order_P = inverse.to(torch.int32).sort(stable=True)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    count = torch.tensor([len(keys)], device=keys_P.device)
    return SortedUniqueKeys(_pad(keys, len(keys_P)), _pad(starts, len(keys_P) + 1), order_P, rows_P, count)


def _pad(values: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat([values, values.new_zeros(size - len(values))])


Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _fake(keys_P: torch.Tensor) -> Outputs:
    longs = keys_P.new_empty(keys_P.shape[0] + 1, dtype=torch.int64)
    rows_P = keys_P.new_empty(keys_P.shape[0], dtype=torch.int32)
    return torch.empty_like(keys_P), longs, longs[1:].clone(), rows_P, longs[:1].clone()


@kernel_op("dedup_keys", fake=_fake)
def _run(keys_P: torch.Tensor) -> Outputs:
    assert keys_P.dim() == 1, "keys must be one-dimensional"
    assert keys_P.dtype in (torch.int32, torch.int64), "keys must be int32 or int64"
    if runs_triton(keys_P) and len(keys_P):
        return _launch(keys_P)
    unique = dedup_keys_reference(keys_P)
    return unique.keys_P, unique.starts, unique.order_P, unique.rows_P, unique.count


def _launch(keys_P: torch.Tensor) -> Outputs:
    size = len(keys_P)
    device = keys_P.device
    sorted_P, order_P = keys_P.sort(stable=True)
    distinct_P = torch.empty_like(sorted_P)
    rows_P = torch.empty(size, dtype=torch.int32, device=device)
    starts = torch.empty(size + 1, dtype=torch.int64, device=device)
    blocks = triton.cdiv(size, _BLOCK)
    counts = torch.empty(blocks, dtype=torch.int32, device=device)
    count = starts.new_empty(1)
    with torch.cuda.device_of(keys_P):
        _count_kernel[(blocks,)](sorted_P, counts, size, BLOCK=_BLOCK)
        ends = counts.cumsum(0, dtype=torch.int32)
        _number_kernel[(blocks,)](sorted_P, counts, ends, distinct_P, rows_P, starts, count, size, BLOCK=_BLOCK)
    return distinct_P, starts, order_P, rows_P, count


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _begins(sorted_keys, index, size):  # type: ignore[no-untyped-def]
        """Return the sorted keys at these indices, and whether each is the first one of its value."""
        key = tl.load(sorted_keys + index, mask=index < size, other=0)
        before = tl.load(sorted_keys + index - 1, mask=(index > 0) & (index < size), other=0)
        return key, (index < size) & ((index == 0) | (key != before))

    @triton.jit
    def _count_kernel(sorted_keys, counts, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        block = tl.program_id(0)
        _, begins = _begins(sorted_keys, block * BLOCK + tl.arange(0, BLOCK), size)
        tl.store(counts + block, tl.sum(begins.to(tl.int32), axis=0))

    @triton.jit
    def _number_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        sorted_keys, counts, ends, distinct, rows, starts, count, size, BLOCK: tl.constexpr
    ):
        block = tl.program_id(0)
        index = block * BLOCK + tl.arange(0, BLOCK)
        key, begins = _begins(sorted_keys, index, size)
        before = tl.load(ends + block) - tl.load(counts + block)
        row = before + tl.cumsum(begins.to(tl.int32), axis=0) - 1
        tl.store(rows + index, row, mask=index < size)
        tl.store(distinct + row, key, mask=begins)
        tl.store(starts + row, index.to(tl.int64), mask=begins)
        is_last = index == size - 1
        tl.store(starts + row + 1, (index + 1).to(tl.int64), mask=is_last)
        tl.store(count + row * 0, (row + 1).to(tl.int64), mask=is_last)
