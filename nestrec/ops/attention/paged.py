"""HSTU attention of the new tokens of many sequences against prefixes that lie in pages, on a GPU.

    history   out[i] = sum_{j <= i} SiLU(q[i] . k[j]) v[j] / normaliser              j over prefix and new history
    candidate out[c] = the same over all history, plus SiLU(q[c] . k[c]) v[c] / normaliser

What each program computes stands in a row of a table that the host writes (`paged_blocks`), so one captured launch
serves any batch: rows of no tokens end at once. Keys outside a sequence are loaded as zeros, and SiLU(0) = 0 is their
mask. With a window and a prefix (mask.py), blocks of keys outside of both are not read. The definition is
`cached_attention_reference`.

Legend: T rows of the batch, H heads, D head dimension.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nestrec.ops.attention.mask import PLAIN, AttentionRules
from nestrec.ops.attention.paged_blocks import BLOCK_KEYS, BLOCK_ROWS, FIELDS, MOST_PARTS


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where the parts of divided prefixes meet; kernels of one stream share one."""

    sums: torch.Tensor
    """(MOST_PARTS, BLOCK_ROWS, H * D) float32"""
    arrived: torch.Tensor
    """(MOST_PARTS, H) int32: parts of a block that are there; zeros between two kernels"""

    @staticmethod
    def make(num_heads: int, dim: int, device: torch.device) -> "Workspace":
        return Workspace(
            torch.empty(MOST_PARTS, BLOCK_ROWS, num_heads * dim, device=device),
            torch.zeros(MOST_PARTS, num_heads, dtype=torch.int32, device=device),
        )


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
def _is_near(stands, key, WINDOW: tl.constexpr, CONTEXT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether queries at these places have these keys in their window or in the prefix."""
    return (stands[:, None] - key[None, :] < WINDOW) | (key < CONTEXT)[None, :]


@triton.jit
def _attention_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0912, PLR0915, PLR0917
    q,
    k,
    v,
    out,
    pool,
    blocks,
    pages,
    sums,
    arrived,
    q_stride,
    k_stride,
    v_stride,
    out_stride,
    pool_value,
    pool_head,
    scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    IS_FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    FIELDS: tl.constexpr,
    ARE_CANDIDATES: tl.constexpr,
    WINDOW: tl.constexpr,
    CONTEXT: tl.constexpr,
):
    head = tl.program_id(0) % HEADS
    block = blocks + (tl.program_id(0) // HEADS) * FIELDS
    num_rows = tl.load(block + 1)
    if num_rows == 0:
        return
    prefix, first_page, history_row = tl.load(block + 2), tl.load(block + 3), tl.load(block + 4)
    first, num_seen, candidate = tl.load(block + 5), tl.load(block + 6), tl.load(block + 7)
    prefix_begin, num_parts = tl.load(block + 8), tl.load(block + 9)
    part, place = tl.load(block + 10), tl.load(block + 11)
    context, low, whole_prefix = tl.load(block + 12), tl.load(block + 13), tl.load(block + 14)
    is_last = part == num_parts - 1
    dim, key, row = tl.arange(0, DIM), tl.arange(0, KEYS), tl.arange(0, ROWS)
    is_row = row < num_rows
    rows = tl.load(block).to(tl.int64) + row
    asking = (candidate - 1).to(tl.int64) + row if ARE_CANDIDATES else rows
    column = head * DIM + dim
    q_RD = tl.load(q + asking[:, None] * q_stride + column[None, :], mask=is_row[:, None], other=0.0)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    pool_keys = pool + head.to(tl.int64) * pool_head
    stands = whole_prefix + first + tl.where(candidate > 0, 0, row)  # all candidates stand where the next event would
    for number in range(prefix_begin, prefix, KEYS):
        start = number
        is_seen = is_row[:, None]
        if WINDOW:
            start = tl.where(number < context, number, number - context + low)
            is_seen = _is_near(stands, start + key, WINDOW, CONTEXT)
        page = tl.load(pages + first_page + start // PAGE).to(tl.int64)
        slot = (page * PAGE + start % PAGE + key)[:, None] * DIM + dim[None, :]
        acc = _attend(
            acc,
            q_RD,
            pool_keys + slot,
            pool_keys + pool_value + slot,
            start + key < whole_prefix,
            is_seen,
            WINDOW > 0,
            IS_FAST,
            PRECISION,
        )
    all_see = tl.minimum(first + 1, num_seen) // KEYS * KEYS
    if WINDOW:
        all_see = tl.minimum(
            tl.maximum(low - whole_prefix, 0), num_seen
        )  # the first block that is seen, of all that come
    new = history_row.to(tl.int64) + key
    if not WINDOW:
        for start in range(0, all_see, KEYS):
            acc = _attend(
                acc,
                q_RD,
                k + (start + new)[:, None] * k_stride + column[None, :],
                v + (start + new)[:, None] * v_stride + column[None, :],
                start + key < num_seen,
                is_row[:, None],
                False,
                IS_FAST,
                PRECISION,
            )
    for start in range(all_see, num_seen, KEYS):
        is_seen = (start + key)[None, :] <= (first + row)[:, None]
        if WINDOW:
            is_seen = is_seen & _is_near(stands, whole_prefix + start + key, WINDOW, CONTEXT)
        acc = _attend(
            acc,
            q_RD,
            k + (start + new)[:, None] * k_stride + column[None, :],
            v + (start + new)[:, None] * v_stride + column[None, :],
            start + key < num_seen,
            is_seen,
            True,
            IS_FAST,
            PRECISION,
        )
    if (candidate > 0) & is_last:
        k_RD = tl.load(k + rows[:, None] * k_stride + column[None, :], mask=is_row[:, None], other=0.0)
        v_RD = tl.load(v + rows[:, None] * v_stride + column[None, :], mask=is_row[:, None], other=0.0)
        own = _silu(tl.sum(q_RD.to(tl.float32) * k_RD.to(tl.float32), 1), IS_FAST)
        acc += own[:, None] * v_RD.to(tl.float32)
    is_whole = num_parts == 1
    if num_parts > 1:
        here = row[:, None] * (HEADS * DIM) + column[None, :]
        tl.store(sums + (place + part).to(tl.int64) * (ROWS * HEADS * DIM) + here, acc)
        tl.debug_barrier()  # all of the part is written before it is said to be there
        counter = arrived + place * HEADS + head
        is_whole = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_parts - 1
        if is_whole:  # whoever comes last adds all parts, always in one order
            tl.debug_barrier()
            acc = tl.zeros((ROWS, DIM), tl.float32)
            for other in range(num_parts):
                acc += tl.load(sums + (place + other).to(tl.int64) * (ROWS * HEADS * DIM) + here, cache_modifier=".cg")
            tl.store(counter, 0)
    if is_whole:
        tl.store(
            out + asking[:, None] * out_stride + column[None, :],
            (acc * scale).to(out.dtype.element_ty),
            mask=is_row[:, None],
        )


@triton.jit
def _store_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    k,
    v,
    pool,
    slots,
    num_rows,
    k_stride,
    v_stride,
    pool_value,
    pool_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
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
    workspace: Workspace,
    page_tokens: int,
    normaliser: float,
    are_candidates: bool = False,
    rules: AttentionRules = PLAIN,
    num_warps: int = 4,
    num_stages: int = 3,
) -> torch.Tensor:
    """As q: (T, H * D); rows that no block names are left as they were in memory.

    q, k, v: (T, H * D), rows may be strided. pool: (2, H, slots, D) of one layer. blocks: (blocks, FIELDS) int32 of
    `write_blocks` with the same rules. pages: int32 page numbers of all sequences. are_candidates: q has rows of
    candidates only, and so have the blocks.
    """
    assert not rules.is_square
    _, num_heads, _, dim = pool.shape
    out = torch.empty_like(q_TW, memory_format=torch.contiguous_format)
    is_half = q_TW.dtype in (torch.bfloat16, torch.float16)
    assert q_TW.stride(1) == k_TW.stride(1) == v_TW.stride(1) == pool.stride(3) == 1
    assert pool.stride(2) == dim
    keys = min(BLOCK_KEYS, page_tokens)
    assert page_tokens % keys == 0
    _attention_kernel[(blocks.shape[0] * num_heads,)](
        q_TW,
        k_TW,
        v_TW,
        out,
        pool,
        blocks,
        pages,
        workspace.sums,
        workspace.arrived,
        q_TW.stride(0),
        k_TW.stride(0),
        v_TW.stride(0),
        out.stride(0),
        pool.stride(0),
        pool.stride(1),
        1.0 / normaliser,
        HEADS=num_heads,
        DIM=dim,
        PAGE=page_tokens,
        ROWS=BLOCK_ROWS,
        KEYS=keys,
        IS_FAST=is_half and q_TW.is_cuda,
        PRECISION="tf32" if is_half else "ieee",
        FIELDS=FIELDS,
        ARE_CANDIDATES=are_candidates,
        WINDOW=rules.max_attention_length or 0,
        CONTEXT=rules.num_context,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out


def store_in_pages(k_TW: torch.Tensor, v_TW: torch.Tensor, pool: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Write keys and values of the rows whose slot is not negative into one layer of the pool."""
    _, num_heads, _, dim = pool.shape
    _store_kernel[(triton.cdiv(len(slots_T), 32), num_heads)](
        k_TW,
        v_TW,
        pool,
        slots_T,
        len(slots_T),
        k_TW.stride(0),
        v_TW.stride(0),
        pool.stride(0),
        pool.stride(1),
        HEADS=num_heads,
        DIM=dim,
        ROWS=32,
    )
