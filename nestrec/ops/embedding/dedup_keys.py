"""Distinct keys on the device: sorted, with the positions of each.

    keys[rows[i]] = sequence[order[i]],  rows and keys ascending,  order ascending inside a key

A stable radix sort brings equal keys together; one kernel counts the beginnings in each block of sorted keys, and one
numbers them. The result is a pure function of the sequence. Nothing waits for the device: outputs have room for as
many distinct keys as there are positions, and `count`, which says how many there are, stays on the device too. Whoever
needs the number on the host (to send keys, to look them up in a host table) waits when reading it.

Shapes: P positions.
"""

from dataclasses import dataclass

import torch

from nestrec.ops.kernel_op import HAS_TRITON, kernel_op, runs_triton

_BLOCK = 2048


@dataclass(frozen=True, slots=True)
class DistinctKeys:
    """The distinct keys of a sequence; entries past `count` mean nothing."""

    keys_P: torch.Tensor
    """ascending, in the sequence's type"""
    starts: torch.Tensor
    """(P + 1,) int64: where each key's positions begin in `order_P`; entry `count` is P"""
    order_P: torch.Tensor
    """int64 positions in the sequence, by key"""
    rows_P: torch.Tensor
    """int32: number of the key, beside `order_P`"""
    count: torch.Tensor
    """(1,) int64 number of distinct keys"""

    def inverse(self) -> torch.Tensor:
        """(P,) int32: number of the key of each position."""
        return torch.empty_like(self.rows_P).scatter_(0, self.order_P, self.rows_P)


def dedup_keys(keys_P: torch.Tensor) -> DistinctKeys:
    """Distinct keys of an int32 or int64 sequence; int32 sorts twice as fast."""
    return DistinctKeys(*_run(keys_P))


def dedup_keys_reference(keys_P: torch.Tensor) -> DistinctKeys:
    """The definition, by torch.unique; it waits for the device."""
    keys, inverse, counts = torch.unique(keys_P, return_inverse=True, return_counts=True)
    rows_P, order_P = inverse.to(torch.int32).sort(stable=True)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    count = torch.tensor([len(keys)], device=keys_P.device)
    return DistinctKeys(_padded(keys, len(keys_P)), _padded(starts, len(keys_P) + 1), order_P, rows_P, count)


def _padded(values: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat([values, values.new_zeros(size - len(values))])


Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _fake(keys_P: torch.Tensor) -> Outputs:
    longs = keys_P.new_empty(keys_P.shape[0] + 1, dtype=torch.int64)
    rows_P = keys_P.new_empty(keys_P.shape[0], dtype=torch.int32)
    return torch.empty_like(keys_P), longs, longs[1:].clone(), rows_P, longs[:1].clone()


@kernel_op("dedup_keys", fake=_fake)
def _run(keys_P: torch.Tensor) -> Outputs:
    assert keys_P.dim() == 1, "a sequence of keys"
    assert keys_P.dtype in (torch.int32, torch.int64), "keys are integers"
    if runs_triton(keys_P) and len(keys_P):
        return _launch(keys_P)
    found = dedup_keys_reference(keys_P)
    return found.keys_P, found.starts, found.order_P, found.rows_P, found.count


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
    def _begins(sorted_keys, place, size):  # type: ignore[no-untyped-def]
        """(key, whether it is the first of its kind) at places of the sorted keys."""
        key = tl.load(sorted_keys + place, mask=place < size, other=0)
        before = tl.load(sorted_keys + place - 1, mask=(place > 0) & (place < size), other=0)
        return key, (place < size) & ((place == 0) | (key != before))

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
        place = block * BLOCK + tl.arange(0, BLOCK)
        key, begins = _begins(sorted_keys, place, size)
        before = tl.load(ends + block) - tl.load(counts + block)
        row = before + tl.cumsum(begins.to(tl.int32), axis=0) - 1
        tl.store(rows + place, row, mask=place < size)
        tl.store(distinct + row, key, mask=begins)
        tl.store(starts + row, place.to(tl.int64), mask=begins)
        is_last = place == size - 1
        tl.store(starts + row + 1, (place + 1).to(tl.int64), mask=is_last)
        tl.store(count + row * 0, (row + 1).to(tl.int64), mask=is_last)
