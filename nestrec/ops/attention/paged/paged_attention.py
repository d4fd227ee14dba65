"""Attention of the new tokens of many sequences against prefixes that lie in pages, on a GPU.

    history   out[i] = sum over prefix and new history j <= i of weight(i, j) v[j]
    candidate out[c] = the same over all history, plus its own weight(c, c) v[c]

kernel.py has the weights of every model. What each program computes stands in a row of a table that the host writes
(blocks.py), so one captured launch serves any batch: rows of no tokens end at once. With a window and a prefix
(mask.py), blocks of keys outside of both are not read. The definitions are in `nestrec.ops.attention.cached`.

Legend: T rows of the batch, H heads, D head dimension.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton

from nestrec.ops.attention.paged.paged_kernel import CHANNEL, SILU, SOFTMAX, attention_kernel, store_kernel
from nestrec.ops.attention.paged.query_blocks import (
    BLOCK_KEYS,
    BLOCK_ROWS,
    FIELDS,
    MOST_PARTS,
    SEES_ALL,
    VisibleRange,
    padded,
)

Weights = Literal["silu", "softmax", "channel"]
_SHARED_BYTES = 160 << 10
"""of queries, keys and values of a program"""
_MODES = {"silu": SILU, "softmax": SOFTMAX, "channel": CHANNEL}


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where the parts of divided prefixes meet; kernels of one stream share one."""

    sums: torch.Tensor
    """(MOST_PARTS, BLOCK_ROWS, H * padded D) float32"""
    statistics: torch.Tensor
    """(MOST_PARTS, H, 2, BLOCK_ROWS) float32: largest score and sum of weights of a softmax"""
    arrived: torch.Tensor
    """(MOST_PARTS, H) int32: parts of a block that are there; zeros between two kernels"""

    @staticmethod
    def make(num_heads: int, dim: int, device: torch.device) -> "Workspace":
        return Workspace(
            torch.empty(MOST_PARTS, BLOCK_ROWS, num_heads * padded(dim), device=device),
            torch.empty(MOST_PARTS, num_heads, 2, BLOCK_ROWS, device=device),
            torch.zeros(MOST_PARTS, num_heads, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class PagedLayerKV:
    """The pages of one layer."""

    pool: torch.Tensor
    """(2, H, slots, D)"""
    scales: torch.Tensor | None = None
    """(2, H, slots) uint8, exponents of powers of two, where the pool is of float8_e4m3fn"""

    @property
    def words(self) -> torch.Tensor:
        return self.pool if self.scales is None else self.pool.view(torch.uint8)

    @property
    def strides(self) -> tuple[int, ...]:
        """of the pool and the scales: from keys to values, from head to head"""
        own = (0, 0) if self.scales is None else (self.scales.stride(0), self.scales.stride(1))
        return (self.pool.stride(0), self.pool.stride(1), *own)


def paged_attention(  # noqa: PLR0917
    q_TW: torch.Tensor | None,
    k_TW: torch.Tensor,
    v_TW: torch.Tensor,
    kept: PagedLayerKV,
    blocks: torch.Tensor,
    pages: torch.Tensor,
    *,
    workspace: Workspace,
    page_tokens: int,
    scale: float,
    weights: Weights = "silu",
    biases: torch.Tensor | None = None,
    num_asked: int | None = None,
    seen: VisibleRange = SEES_ALL,
    num_warps: int = BLOCK_ROWS // 16,
    num_stages: int | None = None,
) -> torch.Tensor:
    """(T, H * D); rows that no block names are left as they were in memory.

    q, k, v: (T, H * D), rows may be strided; a channel needs no q. blocks: (blocks, FIELDS) int32 of `write_blocks`,
    which was told the same of what is seen. pages: int32 page numbers of all sequences. scale: of the result, or of
    the scores of a softmax. biases: of `write_biases`, for the same blocks. num_asked: q has so many rows, those of
    candidates only, and so have the blocks.
    """
    _, num_heads, _, dim = kept.pool.shape
    out = k_TW.new_empty(len(k_TW) if num_asked is None else num_asked, num_heads * dim)
    q = v_TW if q_TW is None else q_TW
    assert q.stride(1) == k_TW.stride(1) == v_TW.stride(1) == kept.pool.stride(3) == 1
    assert kept.pool.stride(2) == dim
    keys = min(BLOCK_KEYS, page_tokens)
    assert page_tokens % keys == 0
    attention_kernel[(blocks.shape[0] * num_heads,)](
        q,
        k_TW,
        v_TW,
        out,
        kept.words,
        kept.scales,
        biases,
        blocks,
        pages,
        workspace.sums,
        workspace.statistics,
        workspace.arrived,
        q.stride(0),
        k_TW.stride(0),
        v_TW.stride(0),
        out.stride(0),
        *kept.strides,
        scale,
        HEADS=num_heads,
        DIM=dim,
        WIDTH=padded(dim),
        PAGE=page_tokens,
        ROWS=BLOCK_ROWS,
        KEYS=keys,
        UNIT=BLOCK_KEYS,
        MODE=_MODES[weights],
        HAS_BIAS=biases is not None,
        IS_FP8=kept.scales is not None,
        IS_FAST=_is_half(out) and out.is_cuda,
        PRECISION="tf32" if _is_half(out) else "ieee",
        FIELDS=FIELDS,
        ARE_CANDIDATES=num_asked is not None,
        REACH=seen.reach,
        CONTEXT=seen.context,
        num_warps=num_warps,
        num_stages=num_stages or _stages(out, padded(dim)),
    )
    return out


def _is_half(out: torch.Tensor) -> bool:
    return out.dtype in (torch.bfloat16, torch.float16)


def _stages(out: torch.Tensor, width: int) -> int:
    """Blocks of keys and values on their way at once, as shared memory has room for beside the queries."""
    queries = BLOCK_ROWS * width * out.itemsize
    per_stage = 2 * BLOCK_KEYS * width * out.itemsize
    return min(max((_SHARED_BYTES - queries) // per_stage, 1), 3)


def store_in_pages(k_TW: torch.Tensor, v_TW: torch.Tensor, kept: PagedLayerKV, slots_T: torch.Tensor) -> None:
    """Write keys and values of the rows whose slot is not negative into one layer of the pool."""
    _, num_heads, _, dim = kept.pool.shape
    store_kernel[(triton.cdiv(len(slots_T), 32), num_heads)](
        k_TW,
        v_TW,
        kept.words,
        kept.scales,
        slots_T,
        len(slots_T),
        k_TW.stride(0),
        v_TW.stride(0),
        *kept.strides,
        DIM=dim,
        WIDTH=padded(dim),
        ROWS=32,
        IS_FP8=kept.scales is not None,
    )
