"""Paged attention on a GPU: new tokens of many sequences attend to a paged KV cache and to each other.

    history   out[i] = sum over prefix and new history j <= i of weight(i, j) v[j]
    candidate out[c] = the same over all history, plus its own weight(c, c) v[c]

paged_kernel.py defines the attention weights of every model. The work of each program is a row of a table that the host
writes (query_blocks.py), so one captured CUDA graph serves any batch: programs whose row has no tokens exit at once.
With a window and a contextual prefix (mask_and_bias.py), blocks of keys outside of both are not read. The reference
implementations are in `nestrec.ops.attention.cached_attention`.

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
    MAX_PARTS,
    SEES_ALL,
    VisibleRange,
    padded,
)

Weights = Literal["silu", "softmax", "channel"]
_SHARED_BYTES = 160 << 10
"""Shared memory budget of a program for queries, keys and values, in bytes."""
_MODES = {"silu": SILU, "softmax": SOFTMAX, "channel": CHANNEL}


@dataclass(frozen=True, slots=True)
class Workspace:
    """Scratch memory that combines the parts of split prefixes; the kernels of one stream share a workspace."""

    sums: torch.Tensor
    """Partial sums, (MAX_PARTS, BLOCK_ROWS, H * padded D) float32."""
    statistics: torch.Tensor
    """Largest score and sum of weights of a partial softmax, (MAX_PARTS, H, 2, BLOCK_ROWS) float32."""
    arrived: torch.Tensor
    """Number of completed parts of each block, (MAX_PARTS, H) int32; zero between two kernels."""

    @staticmethod
    def create(num_heads: int, dim: int, device: torch.device) -> "Workspace":
        return Workspace(
            torch.empty(MAX_PARTS, BLOCK_ROWS, num_heads * padded(dim), device=device),
            torch.empty(MAX_PARTS, num_heads, 2, BLOCK_ROWS, device=device),
            torch.zeros(MAX_PARTS, num_heads, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class PagedLayerKV:
    """KV cache pages of one layer."""

    pool: torch.Tensor
    """Cached keys and cached values, (2, H, slots, D)."""
    scales: torch.Tensor | None = None
    """Exponents of the power-of-two scales, (2, H, slots) uint8; None unless the pool is float8_e4m3fn."""

    @property
    def words(self) -> torch.Tensor:
        return self.pool if self.scales is None else self.pool.view(torch.uint8)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the pool and the scales: from keys to values, and from head to head."""
        own = (0, 0) if self.scales is None else (self.scales.stride(0), self.scales.stride(1))
        return (self.pool.stride(0), self.pool.stride(1), *own)


def paged_attention(  # noqa: PLR0917
    q_TW: torch.Tensor | None,
    k_TW: torch.Tensor,
    v_TW: torch.Tensor,
    layer_kv: PagedLayerKV,
    blocks: torch.Tensor,
    pages: torch.Tensor,
    *,
    workspace: Workspace,
    page_tokens: int,
    scale: float,
    weights: Weights = "silu",
    biases: torch.Tensor | None = None,
    num_queries: int | None = None,
    visible_range: VisibleRange = SEES_ALL,
    num_warps: int = BLOCK_ROWS // 16,
    num_stages: int | None = None,
) -> torch.Tensor:
    """Compute attention of new tokens over a paged KV cache and over each other.

    Args:
        q_TW: Queries, (T, H * D); rows can be strided. Not needed for `weights="channel"`.
        k_TW: Keys, (T, H * D); rows can be strided.
        v_TW: Values, (T, H * D); rows can be strided.
        layer_kv: KV cache of the layer.
        blocks: Table written by `write_blocks` with the same visible range, (blocks, FIELDS) int32.
        pages: Block table: page numbers of all sequences, int32.
        workspace: Scratch memory of the stream.
        page_tokens: Number of tokens per page.
        scale: Factor of the result, or of the scores for softmax attention.
        weights: Kind of attention weights; see paged_kernel.py.
        biases: Biases written by `write_biases` for the same blocks.
        num_queries: Number of rows of `q_TW` and of the output if they contain candidates only.
        visible_range: Keys that the layer attends to.
        num_warps: Number of warps per program.
        num_stages: Pipeline depth; None selects it by shared memory size.

    Returns:
        Attention output, (T or num_queries, H * D). Rows that no block covers are uninitialized.
    """
    _, num_heads, _, dim = layer_kv.pool.shape
    out = k_TW.new_empty(len(k_TW) if num_queries is None else num_queries, num_heads * dim)
    q = v_TW if q_TW is None else q_TW
    assert q.stride(1) == k_TW.stride(1) == v_TW.stride(1) == layer_kv.pool.stride(3) == 1
    assert layer_kv.pool.stride(2) == dim
    keys = min(BLOCK_KEYS, page_tokens)
    assert page_tokens % keys == 0
    attention_kernel[(blocks.shape[0] * num_heads,)](
        q,
        k_TW,
        v_TW,
        out,
        layer_kv.words,
        layer_kv.scales,
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
        *layer_kv.strides,
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
        IS_FP8=layer_kv.scales is not None,
        IS_FAST=_is_half(out) and out.is_cuda,
        PRECISION="tf32" if _is_half(out) else "ieee",
        FIELDS=FIELDS,
        ARE_CANDIDATES=num_queries is not None,
        REACH=visible_range.reach,
        CONTEXT=visible_range.context,
        num_warps=num_warps,
        num_stages=num_stages or _stages(out, padded(dim)),
    )
    return out


def _is_half(out: torch.Tensor) -> bool:
    return out.dtype in (torch.bfloat16, torch.float16)


def _stages(out: torch.Tensor, width: int) -> int:
    """Return the pipeline depth: blocks of keys and values that fit into shared memory together with the queries."""
    queries = BLOCK_ROWS * width * out.itemsize
    per_stage = 2 * BLOCK_KEYS * width * out.itemsize
    return min(max((_SHARED_BYTES - queries) // per_stage, 1), 3)


def store_in_pages(k_TW: torch.Tensor, v_TW: torch.Tensor, layer_kv: PagedLayerKV, slots_T: torch.Tensor) -> None:
    """Write keys and values into the KV cache of one layer; rows with a negative slot are skipped.

    Args:
        k_TW: Keys, (T, H * D).
        v_TW: Values, (T, H * D).
        layer_kv: KV cache of the layer.
        slots_T: Slot of each row in the pool, or a negative number.
    """
    _, num_heads, _, dim = layer_kv.pool.shape
    store_kernel[(triton.cdiv(len(slots_T), 32), num_heads)](
        k_TW,
        v_TW,
        layer_kv.words,
        layer_kv.scales,
        slots_T,
        len(slots_T),
        k_TW.stride(0),
        v_TW.stride(0),
        *layer_kv.strides,
        DIM=dim,
        WIDTH=padded(dim),
        ROWS=32,
        IS_FP8=layer_kv.scales is not None,
    )
