"""HSTU attention of the new tokens of many sequences against prefixes that lie in pages, on a GPU.

    history   out[i] = sum_{j <= i} SiLU(q[i] . k[j]) v[j] / normaliser              j over prefix and new history
    candidate out[c] = the same over all history, plus SiLU(q[c] . k[c]) v[c] / normaliser

What each program computes stands in a row of a table that the host writes (`plan_blocks`), so one captured launch
serves any batch: rows of no tokens end at once. Keys outside a sequence are loaded as zeros, and SiLU(0) = 0 is their
mask. The definition is `cached_attention_reference`.

Legend: T rows of the batch, H heads, D head dimension.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

BLOCK_ROWS = 64
BLOCK_KEYS = 64
FIELDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedSegment:
    """New tokens of one sequence: where its rows lie in the batch and its pages in the table of pages."""

    prefix_length: int
    num_history: int
    num_candidates: int
    history_row: int
    candidate_row: int
    first_page: int


def plan_blocks(segments: Sequence[PagedSegment], block_rows: int = BLOCK_ROWS) -> NDArray[np.int32]:
    """(blocks, FIELDS) rows, keys and pages of each block of queries, the longest first."""
    blocks = [np.empty((0, FIELDS), np.int32)]
    for s in segments:
        place = (0, s.prefix_length, s.first_page, s.history_row, 0, 0, 0)
        if s.num_history:
            blocks.append(_blocks_of(s.num_history, -1, block_rows) + np.array((s.history_row, *place), np.int32))
        if s.num_candidates:
            own = _blocks_of(s.num_candidates, s.num_history, block_rows)
            blocks.append(own + np.array((s.candidate_row, *place), np.int32))
    joined = np.concatenate(blocks)
    chosen: NDArray[np.int32] = joined[np.argsort(-(joined[:, 2] + joined[:, 6]), kind="stable")]
    return chosen


@functools.lru_cache(maxsize=4096)
def _blocks_of(total: int, seen: int, block_rows: int) -> NDArray[np.int32]:
    """Blocks of so many rows, wherever they lie. seen: new history before each of them; -1 where they are history."""
    first = np.arange(0, total, block_rows)
    blocks = np.zeros((len(first), FIELDS), np.int32)
    blocks[:, 0], blocks[:, 1] = first, np.minimum(block_rows, total - first)
    blocks[:, 5] = first if seen < 0 else seen
    blocks[:, 6] = first + blocks[:, 1] if seen < 0 else seen
    blocks[:, 7] = seen >= 0
    return blocks


@triton.jit
def _silu(x, IS_FAST: tl.constexpr):  # type: ignore[no-untyped-def]
    if IS_FAST:  # one special-function instruction an element instead of two, which would bound the kernel
        half = 0.5 * x
        tanh = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [half], dtype=tl.float32, is_pure=True, pack=1
        )
        return half + half * tanh
    return x * tl.sigmoid(x)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    acc, q, k_ptrs, v_ptrs, is_key, is_seen, IS_MASKED: tl.constexpr, IS_FAST: tl.constexpr, PRECISION: tl.constexpr
):
    k = tl.load(k_ptrs, mask=is_key[:, None], other=0.0)
    v = tl.load(v_ptrs, mask=is_key[:, None], other=0.0)
    weights = _silu(tl.dot(q, tl.trans(k), input_precision=PRECISION), IS_FAST)
    if IS_MASKED:
        weights = tl.where(is_seen, weights, 0.0)
    return tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)


@triton.jit
def _attention_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    q, k, v, out, pool, blocks, pages, q_stride, k_stride, v_stride, out_stride, pool_value, pool_head, scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    IS_FAST: tl.constexpr, PRECISION: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % HEADS
    block = blocks + (tl.program_id(0) // HEADS) * FIELDS
    num_rows = tl.load(block + 1)
    if num_rows == 0:
        return
    prefix, first_page, history_row = tl.load(block + 2), tl.load(block + 3), tl.load(block + 4)
    first, num_seen, is_candidate = tl.load(block + 5), tl.load(block + 6), tl.load(block + 7)
    dim, key, row = tl.arange(0, DIM), tl.arange(0, KEYS), tl.arange(0, ROWS)
    is_row = row < num_rows
    rows = tl.load(block).to(tl.int64) + row
    column = head * DIM + dim
    q_RD = tl.load(q + rows[:, None] * q_stride + column[None, :], mask=is_row[:, None], other=0.0)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    pool_keys = pool + head.to(tl.int64) * pool_head
    for start in range(0, prefix, KEYS):
        page = tl.load(pages + first_page + start // PAGE).to(tl.int64)
        slot = (page * PAGE + start % PAGE + key)[:, None] * DIM + dim[None, :]
        acc = _attend(
            acc, q_RD, pool_keys + slot, pool_keys + pool_value + slot, start + key < prefix, is_row[:, None],
            False, IS_FAST, PRECISION,
        )  # fmt: skip
    all_see = tl.minimum(first + 1, num_seen) // KEYS * KEYS
    new = history_row.to(tl.int64) + key
    for start in range(0, all_see, KEYS):
        acc = _attend(
            acc, q_RD, k + (start + new)[:, None] * k_stride + column[None, :],
            v + (start + new)[:, None] * v_stride + column[None, :], start + key < num_seen, is_row[:, None],
            False, IS_FAST, PRECISION,
        )  # fmt: skip
    for start in range(all_see, num_seen, KEYS):
        is_seen = (start + key)[None, :] <= (first + row)[:, None]
        acc = _attend(
            acc, q_RD, k + (start + new)[:, None] * k_stride + column[None, :],
            v + (start + new)[:, None] * v_stride + column[None, :], start + key < num_seen, is_seen,
            True, IS_FAST, PRECISION,
        )  # fmt: skip
    if is_candidate == 1:
        k_RD = tl.load(k + rows[:, None] * k_stride + column[None, :], mask=is_row[:, None], other=0.0)
        v_RD = tl.load(v + rows[:, None] * v_stride + column[None, :], mask=is_row[:, None], other=0.0)
        own = _silu(tl.sum(q_RD.to(tl.float32) * k_RD.to(tl.float32), 1), IS_FAST)
        acc += own[:, None] * v_RD.to(tl.float32)
    tl.store(
        out + rows[:, None] * out_stride + column[None, :], (acc * scale).to(out.dtype.element_ty), mask=is_row[:, None]
    )


@triton.jit
def _store_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    k, v, pool, slots, num_rows, k_stride, v_stride, pool_value, pool_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    slot = tl.load(slots + row, mask=row < num_rows, other=-1).to(tl.int64)
    is_kept = (slot >= 0)[:, None]
    column = (head * DIM + dim)[None, :]
    place = pool + head.to(tl.int64) * pool_head + slot[:, None] * DIM + dim[None, :]
    tl.store(place, tl.load(k + row[:, None] * k_stride + column, mask=is_kept, other=0.0), mask=is_kept)
    tl.store(place + pool_value, tl.load(v + row[:, None] * v_stride + column, mask=is_kept, other=0.0), mask=is_kept)


def paged_attention(  # noqa: PLR0917
    q_TW: torch.Tensor,
    k_TW: torch.Tensor,
    v_TW: torch.Tensor,
    pool: torch.Tensor,
    blocks: torch.Tensor,
    pages: torch.Tensor,
    *,
    page_tokens: int,
    normaliser: float,
    block_rows: int = BLOCK_ROWS,
    num_warps: int = 4,
    num_stages: int = 3,
) -> torch.Tensor:
    """(T, H * D); rows that no block names are left as they were in memory.

    q, k, v: (T, H * D), rows may be strided. pool: (2, H, slots, D) of one layer. blocks: (blocks, FIELDS) int32 of
    `plan_blocks`. pages: int32 page numbers of all sequences.
    """
    _, num_heads, _, dim = pool.shape
    out = torch.empty_like(q_TW, memory_format=torch.contiguous_format)
    is_half = q_TW.dtype in (torch.bfloat16, torch.float16)
    assert q_TW.stride(1) == k_TW.stride(1) == v_TW.stride(1) == pool.stride(3) == 1
    assert pool.stride(2) == dim
    keys = min(BLOCK_KEYS, page_tokens)
    assert page_tokens % keys == 0
    _attention_kernel[(blocks.shape[0] * num_heads,)](
        q_TW, k_TW, v_TW, out, pool, blocks, pages, q_TW.stride(0), k_TW.stride(0), v_TW.stride(0), out.stride(0),
        pool.stride(0), pool.stride(1), 1.0 / normaliser,
        HEADS=num_heads, DIM=dim, PAGE=page_tokens, ROWS=block_rows, KEYS=keys, IS_FAST=is_half and q_TW.is_cuda,
        PRECISION="tf32" if is_half else "ieee", FIELDS=FIELDS, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out


def store_in_pages(k_TW: torch.Tensor, v_TW: torch.Tensor, pool: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Write keys and values of the rows whose slot is not negative into one layer of the pool."""
    _, num_heads, _, dim = pool.shape
    _store_kernel[(triton.cdiv(len(slots_T), 32), num_heads)](
        k_TW, v_TW, pool, slots_T, len(slots_T), k_TW.stride(0), v_TW.stride(0), pool.stride(0), pool.stride(1),
        HEADS=num_heads, DIM=dim, ROWS=32,
    )  # fmt: skip
