"""Exact top-k search (maximum inner product) of an index: one pass over the rows, without storing the scores.

    score(b, n)   query_b . row_n (* scale_n), in float32; -inf for excluded pairs
    top k         the first k rows by (highest score, smallest n)

The search has two phases and is exact. The first phase computes the best score of each group of GROUP rows. The first k
groups of a query by (highest best score, smallest group) contain its top-k rows: a row outside of them has a lower
score than the best row of each of these groups, or an equal score and a larger row number. The second phase computes
the scores of only these groups again, with the same instructions, and selects the top k of their rows.

A score and a row number are packed into one int64 key with the order of both: the bits of the score, made monotone,
above 2**31 - 1 - number. Keys of different shards of an index are comparable: shards are searched separately and the
results are merged (`merge_keys`).

Legend: B queries, D elements, N rows, K results per query, P excluded pairs.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.ops.kernel_op import HAS_TRITON, power_of_two, runs_triton

GROUP = 128
"""Number of rows per group; the first phase computes one best score per group."""
MAX_ROWS = 2**31 - 1
"""Maximum number of rows of an index: row numbers have 31 bits in a key."""
_MAX_KEYS = 1 << 23
"""Maximum number of keys per launch of a phase; further queries are processed in later launches."""
_LOW = 0xFFFFFFFF
_NEGATIVE_INFINITY = -0x800000
"""Monotone int32 bits of a score of -inf."""
LOWEST_KEY = -(1 << 63)
"""Key that is smaller than all others; used for padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRows:
    """Rows of an index, or of one shard of an index."""

    rows_ND: torch.Tensor
    """(N, D) rows in bfloat16, float16, float32, int8 or float8_e4m3fn; may be strided."""
    scale_N: torch.Tensor | None = None
    """(N,) float32 dequantization scale of each row; None means 1."""
    first: int = 0
    """Number of the first row in the full index; nonzero for shards."""

    def __len__(self) -> int:
        return len(self.rows_ND)

    @property
    def query_dtype(self) -> torch.dtype:
        """Dtype to which queries are converted for the dot products."""
        return self.rows_ND.dtype if self.rows_ND.dtype.itemsize > 1 else torch.float16


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludedPairs:
    """(query, row) pairs to exclude from the results, sorted by row; row numbers are those of the full index.

    Pairs with a row outside of the index (-1, or after its end) are ignored; they pad a buffer of fixed size.
    """

    query_P: torch.Tensor
    """(P,) int32 index of the query; pairs with a negative index are ignored."""
    row_P: torch.Tensor
    """(P,) int64 row number, in ascending order."""

    @staticmethod
    def of(query_P: torch.Tensor, row_P: torch.Tensor) -> "ExcludedPairs":
        """Sort pairs of any order by row."""
        row_P, order = row_P.sort(stable=True)
        return ExcludedPairs(query_P=query_P[order].int(), row_P=row_P)


def top_k_keys(
    queries_BD: torch.Tensor, index: IndexRows, k: int, excluded: ExcludedPairs | None = None
) -> torch.Tensor:
    """Return the top-k rows of each query as (B, min(k, N)) int64 keys, best first; `scores_and_rows` unpacks them.

    On a GPU it can be captured in a CUDA graph.

    Args:
        queries_BD: Queries.
        index: Rows to search.
        k: Number of results per query.
        excluded: Pairs that get a score of -inf.
    """
    assert index.first + len(index) <= MAX_ROWS, "row numbers must fit in 31 bits"
    if not runs_triton(queries_BD):
        return top_k_keys_reference(queries_BD, index, k, excluded)
    k = min(k, len(index))
    groups = -(-len(index) // GROUP)
    max_queries = max(1, _MAX_KEYS // max(groups, min(k, groups) * GROUP))
    parts = [
        _launch(queries_BD[first : first + max_queries], index, k, _select_queries(excluded, first, max_queries))
        for first in range(0, len(queries_BD), max_queries)
    ]
    return parts[0] if len(parts) == 1 else torch.cat([queries_BD.new_zeros(0, k, dtype=torch.int64), *parts])


def top_k_keys_reference(
    queries_BD: torch.Tensor, index: IndexRows, k: int, excluded: ExcludedPairs | None = None
) -> torch.Tensor:
    """Reference implementation of `top_k_keys`: computes all scores."""
    numbers_N = torch.arange(index.first, index.first + len(index), device=queries_BD.device)
    return (
        pack_score_keys(reference_scores(queries_BD, index, excluded), numbers_N).topk(min(k, len(index)), dim=1).values
    )


def reference_scores(queries_BD: torch.Tensor, index: IndexRows, excluded: ExcludedPairs | None = None) -> torch.Tensor:
    """Return the (B, N) float32 scores of all rows; -inf for excluded pairs."""
    scores_BN = queries_BD.to(index.query_dtype).float() @ index.rows_ND.float().T
    if index.scale_N is not None:
        scores_BN = scores_BN * index.scale_N
    if excluded is not None:
        is_in_index = (excluded.row_P >= index.first) & (excluded.row_P < index.first + len(index))
        scores_BN[excluded.query_P[is_in_index].long(), excluded.row_P[is_in_index] - index.first] = -torch.inf
    return scores_BN


def merge_keys(parts: list[torch.Tensor], k: int) -> torch.Tensor:
    """Merge the keys of several shards of an index; returns the (B, at most k) best, best first."""
    keys = torch.cat(parts, 1)
    return keys.topk(min(k, keys.shape[1]), dim=1).values


def pack_score_keys(scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Pack float32 scores and row numbers into int64 keys. NaN is treated as -inf, and -0 as 0."""
    scores = torch.where(scores == scores, scores, -torch.inf)  # noqa: PLR0124 - false for NaN
    bits = torch.where(scores == 0.0, 0.0, scores).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | (MAX_ROWS - numbers.long())


def scores_and_rows(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack keys into float32 scores and int64 row numbers; -inf and -1 for entries without a row.

    On a CPU this is one compiled call that holds the GIL. Torch operators release it one by one, and in a server the
    engine would then wait for the HTTP thread each time to get it back.
    """
    if keys.device.type != "cpu":
        return scores_and_rows_reference(keys)
    bits, rows = torch.empty(keys.shape, dtype=torch.int32), torch.empty(keys.shape, dtype=torch.int64)
    _split(keys.contiguous().view(-1).numpy(), bits.view(-1).numpy(), rows.view(-1).numpy())
    return bits.view(torch.float32), rows


def scores_and_rows_reference(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference implementation of `scores_and_rows`."""
    ordered = (keys >> 32).int()
    scores = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return scores, torch.where(scores == -torch.inf, -1, MAX_ROWS - (keys & _LOW))


@njit(cache=True)
def _split(keys: NDArray[np.int64], bits: NDArray[np.int32], rows: NDArray[np.int64]) -> None:
    for i in range(len(keys)):
        ordered = keys[i] >> 32
        score_bits = np.int32(ordered) if ordered >= 0 else np.int32(ordered ^ 0x7FFFFFFF)
        bits[i] = score_bits
        rows[i] = -1 if score_bits == _NEGATIVE_INFINITY else MAX_ROWS - (keys[i] & _LOW)


def _select_queries(excluded: ExcludedPairs | None, first: int, count: int) -> ExcludedPairs | None:
    """Return the excluded pairs with query indices relative to `first`; pairs of earlier queries become negative."""
    if excluded is None or first == 0:
        return excluded
    query_P = torch.where(excluded.query_P < first, -1, excluded.query_P - first)
    return ExcludedPairs(query_P=query_P, row_P=excluded.row_P)


def _launch(queries_BD: torch.Tensor, index: IndexRows, k: int, excluded: ExcludedPairs | None) -> torch.Tensor:
    num_queries = len(queries_BD)
    dim = queries_BD.shape[1]
    num_groups = -(-len(index) // GROUP)
    queries_BD, rows_ND = queries_BD.to(index.query_dtype).contiguous(), index.rows_ND
    assert (rows_ND.stride(1), rows_ND.shape[1]) == (1, dim), "rows must be contiguous and as wide as the queries"
    is_wide = rows_ND.dtype == torch.float32
    device = queries_BD.device
    # Small blocks for float32: without tensor cores the dot product is unrolled.
    block_b = max(16, min(16 if is_wide else 64, power_of_two(num_queries)))
    starts = None
    if excluded is not None:
        bounds = torch.arange(index.first, index.first + GROUP * (num_groups + 1), GROUP, device=device)
        starts = torch.searchsorted(excluded.row_P, bounds, out_int32=True)
    arguments = (
        queries_BD,
        rows_ND,
        index.scale_N,
        starts,
        None if excluded is None else excluded.query_P,
        None if excluded is None else excluded.row_P,
    )
    sizes = {
        "DIM": dim,
        "GROUP": GROUP,
        "BLOCK_B": block_b,
        "BLOCK_D": max(16, min(32 if is_wide else 128, power_of_two(dim))),
        "num_warps": _WARPS,
    }
    with torch.cuda.device_of(queries_BD):
        groups_BG = torch.empty(num_queries, num_groups, dtype=torch.int64, device=device)
        _pass_kernel[(-(-num_queries // block_b) * num_groups,)](
            *arguments, groups_BG, num_queries, len(index), num_groups, index.first, rows_ND.stride(0), **sizes
        )
        num_chosen = min(k, num_groups)
        chosen_BK = groups_BG.topk(num_chosen, dim=1, sorted=False).values
        keys = torch.empty(num_queries, num_chosen * GROUP, dtype=torch.int64, device=device)
        _chosen_kernel[(num_queries, num_chosen)](
            *arguments, chosen_BK, keys, num_queries, len(index), num_chosen, index.first, rows_ND.stride(0), **sizes
        )
    return keys.topk(k, dim=1).values


_WARPS = 4

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _keys_of(scores, number):  # type: ignore[no-untyped-def]
        """Pack scores and row numbers into keys; same as `pack_score_keys`."""
        scores = tl.where(scores == scores, scores, float("-inf"))  # noqa: PLR0124 - not a number
        bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - number).to(tl.int64)

    @triton.jit
    def _group_scores(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        queries,
        rows,
        scale,
        starts,
        excluded_query,
        excluded_row,
        first_query,
        group,
        num_queries,
        num_rows,
        first,
        row_stride,
        DIM: tl.constexpr,
        GROUP: tl.constexpr,
        BLOCK_B: tl.constexpr,
        BLOCK_D: tl.constexpr,
    ):
        """Return the (GROUP, BLOCK_B) scores of a group's rows, bitwise identical in both phases."""
        b = first_query + tl.arange(0, BLOCK_B)
        n = group * GROUP + tl.arange(0, GROUP)
        d = tl.arange(0, BLOCK_D)
        here = rows + (group * GROUP).to(tl.int64) * row_stride
        local = tl.arange(0, GROUP)[:, None].to(tl.int64) * row_stride
        scores = tl.zeros((GROUP, BLOCK_B), tl.float32)
        for start in range(0, DIM, BLOCK_D):
            column = start + d
            is_row = (n < num_rows)[:, None] & (column < DIM)[None, :]
            is_query = (column < DIM)[:, None] & (b < num_queries)[None, :]
            vectors = tl.load(here + local + column[None, :], mask=is_row, other=0.0)
            query_vectors = tl.load(queries + b[None, :] * DIM + column[:, None], mask=is_query, other=0.0)
            scores = tl.dot(vectors.to(query_vectors.dtype), query_vectors, scores, input_precision="ieee")
        if scale is not None:
            scores = scores * tl.load(scale + n, mask=n < num_rows, other=0.0)[:, None]
        scores = tl.where((n < num_rows)[:, None], scores, float("-inf"))
        if starts is not None:
            for pair in range(tl.load(starts + group), tl.load(starts + group + 1)):
                query, row = tl.load(excluded_query + pair), tl.load(excluded_row + pair) - first
                scores = tl.where((n == row)[:, None] & (b == query)[None, :], float("-inf"), scores)
        return scores

    @triton.jit
    def _pass_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        queries,
        rows,
        scale,
        starts,
        excluded_query,
        excluded_row,
        groups,
        num_queries,
        num_rows,
        num_groups,
        first,
        row_stride,
        DIM: tl.constexpr,
        GROUP: tl.constexpr,
        BLOCK_B: tl.constexpr,
        BLOCK_D: tl.constexpr,
    ):
        # Consecutive programs process the query blocks of one group, so that they all find its rows in the L2 cache.
        num_blocks = tl.cdiv(num_queries, BLOCK_B)
        first_query, group = tl.program_id(0) % num_blocks * BLOCK_B, tl.program_id(0) // num_blocks
        scores = _group_scores(
            queries,
            rows,
            scale,
            starts,
            excluded_query,
            excluded_row,
            first_query,
            group,
            num_queries,
            num_rows,
            first,
            row_stride,
            DIM,
            GROUP,
            BLOCK_B,
            BLOCK_D,
        )
        scores = tl.where(scores == scores, scores, float("-inf"))  # noqa: PLR0124 - not a number
        b = first_query + tl.arange(0, BLOCK_B)
        at = b.to(tl.int64) * num_groups + group
        tl.store(groups + at, _keys_of(tl.max(scores, axis=0), group), mask=b < num_queries)

    @triton.jit
    def _chosen_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        queries,
        rows,
        scale,
        starts,
        excluded_query,
        excluded_row,
        chosen,
        keys,
        num_queries,
        num_rows,
        num_chosen,
        first,
        row_stride,
        DIM: tl.constexpr,
        GROUP: tl.constexpr,
        BLOCK_B: tl.constexpr,
        BLOCK_D: tl.constexpr,
    ):
        query, choice = tl.program_id(0), tl.program_id(1)
        at = query.to(tl.int64) * num_chosen + choice
        group = 0x7FFFFFFF - (tl.load(chosen + at) & 0xFFFFFFFF).to(tl.int32)
        scores = _group_scores(
            queries,
            rows,
            scale,
            starts,
            excluded_query,
            excluded_row,
            query // BLOCK_B * BLOCK_B,
            group,
            num_queries,
            num_rows,
            first,
            row_stride,
            DIM,
            GROUP,
            BLOCK_B,
            BLOCK_D,
        )
        is_own = (tl.arange(0, BLOCK_B) == query % BLOCK_B)[None, :]
        own = tl.sum(tl.where(is_own, scores, 0.0), axis=1)
        n = tl.arange(0, GROUP)
        tl.store(keys + at * GROUP + n, _keys_of(own, first + group * GROUP + n))
