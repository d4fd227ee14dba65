"""The best rows of an index for each query: one pass over the index, and scores are never written out.

    score(b, n)   query_b . row_n (* scale_n), in float32; -inf for excluded pairs
    best          the k first by (highest score, smallest n)

Exact in two phases. The pass leaves the best score of each group of GROUP rows. Of a query, the k groups that are first
by (highest best score, smallest group) hold its k best rows: a row outside of them is beaten by the best one of each,
and of equal scores theirs has the smaller number. So the second phase computes those groups alone again, by the same
instructions, and picks among their rows.

A score and a number travel as one int64 key that orders as both do: the bits of the score, made monotone, above
2**31 - 1 - number. Keys of two parts of an index can be compared: parts that lie apart are searched apart and merged.

Legend: B queries, D elements, N rows, K best, P excluded pairs.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.ops.kernel_op import HAS_TRITON, power_of_two, runs_triton

GROUP = 128
"""rows of which the pass leaves the best score"""
MOST_ROWS = 2**31 - 1
"""numbers that fit into a key"""
_MOST_KEYS = 1 << 23
"""of one launch of either phase: further queries come after it"""
_LOW = 0xFFFFFFFF
_NEGATIVE_INFINITY = -0x800000
"""its bits as a whole number"""
NOTHING = -(1 << 63)
"""a key below all others"""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRows:
    """What is searched."""

    rows_ND: torch.Tensor
    """bfloat16, float16, float32, int8 or float8_e4m3fn; rows may be strided"""
    scale_N: torch.Tensor | None = None
    """float32, what the elements of each row are multiplied with"""
    first: int = 0
    """number of the first row, where this is a part of an index"""

    def __len__(self) -> int:
        return len(self.rows_ND)

    @property
    def query_dtype(self) -> torch.dtype:
        """In which queries meet the rows."""
        return self.rows_ND.dtype if self.rows_ND.dtype.itemsize > 1 else torch.float16


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludedPairs:
    """(query, row) pairs that do not count, by ascending row; numbers of rows are those of the whole index.

    Pairs of no row of an index (-1 before, or beyond its end) fill up a buffer of fixed size.
    """

    query_P: torch.Tensor
    """int32"""
    row_P: torch.Tensor
    """int64"""

    @staticmethod
    def of(query_P: torch.Tensor, row_P: torch.Tensor) -> "ExcludedPairs":
        """Pairs in any order."""
        row_P, order = row_P.sort(stable=True)
        return ExcludedPairs(query_P=query_P[order].int(), row_P=row_P)


def best_keys(
    queries_BD: torch.Tensor, index: IndexRows, k: int, excluded: ExcludedPairs | None = None
) -> torch.Tensor:
    """(B, min(k, N)) int64 keys, best first; see `scores_and_rows`. Captured by a graph where it runs on a GPU."""
    assert index.first + len(index) <= MOST_ROWS, "numbers of rows have 31 bits"
    if not runs_triton(queries_BD):
        return best_keys_reference(queries_BD, index, k, excluded)
    k = min(k, len(index))
    groups = -(-len(index) // GROUP)
    most = max(1, _MOST_KEYS // max(groups, min(k, groups) * GROUP))
    parts = [
        _launch(queries_BD[first : first + most], index, k, _of_queries(excluded, first, most))
        for first in range(0, len(queries_BD), most)
    ]
    return parts[0] if len(parts) == 1 else torch.cat([queries_BD.new_zeros(0, k, dtype=torch.int64), *parts])


def best_keys_reference(
    queries_BD: torch.Tensor, index: IndexRows, k: int, excluded: ExcludedPairs | None = None
) -> torch.Tensor:
    """The definition."""
    numbers_N = torch.arange(index.first, index.first + len(index), device=queries_BD.device)
    return packed(reference_scores(queries_BD, index, excluded), numbers_N).topk(min(k, len(index)), dim=1).values


def reference_scores(queries_BD: torch.Tensor, index: IndexRows, excluded: ExcludedPairs | None = None) -> torch.Tensor:
    """(B, N) float32 scores."""
    scores_BN = queries_BD.to(index.query_dtype).float() @ index.rows_ND.float().T
    if index.scale_N is not None:
        scores_BN = scores_BN * index.scale_N
    if excluded is not None:
        here = (excluded.row_P >= index.first) & (excluded.row_P < index.first + len(index))
        scores_BN[excluded.query_P[here].long(), excluded.row_P[here] - index.first] = -torch.inf
    return scores_BN


def merged_keys(parts: list[torch.Tensor], k: int) -> torch.Tensor:
    """(B, at most k) the best of what several parts of an index gave."""
    keys = torch.cat(parts, 1)
    return keys.topk(min(k, keys.shape[1]), dim=1).values


def packed(scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """int64 keys of float32 scores and numbers of rows. Not a number counts as -inf, and -0 as 0."""
    scores = torch.where(scores == scores, scores, -torch.inf)  # noqa: PLR0124 - not a number
    bits = torch.where(scores == 0.0, 0.0, scores).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | (MOST_ROWS - numbers.long())


def scores_and_rows(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 scores and int64 numbers of rows; -inf and -1 where nothing was left.

    On a host in one call that keeps the interpreter: operators give it up one by one, and a server's engine waits for
    its front to hand it back as often.
    """
    if keys.device.type != "cpu":
        return scores_and_rows_reference(keys)
    bits, rows = torch.empty(keys.shape, dtype=torch.int32), torch.empty(keys.shape, dtype=torch.int64)
    _split(keys.contiguous().view(-1).numpy(), bits.view(-1).numpy(), rows.view(-1).numpy())
    return bits.view(torch.float32), rows


def scores_and_rows_reference(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition."""
    ordered = (keys >> 32).int()
    scores = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return scores, torch.where(scores == -torch.inf, -1, MOST_ROWS - (keys & _LOW))


@njit(cache=True)
def _split(keys: NDArray[np.int64], bits: NDArray[np.int32], rows: NDArray[np.int64]) -> None:
    for place in range(len(keys)):
        ordered = keys[place] >> 32
        found = np.int32(ordered) if ordered >= 0 else np.int32(ordered ^ 0x7FFFFFFF)
        bits[place] = found
        rows[place] = -1 if found == _NEGATIVE_INFINITY else MOST_ROWS - (keys[place] & _LOW)


def _of_queries(excluded: ExcludedPairs | None, first: int, count: int) -> ExcludedPairs | None:
    """Pairs of some queries, counted from the first of them. Those of others are no pairs: their query is negative."""
    if excluded is None or first == 0:
        return excluded
    query_P = torch.where(excluded.query_P < first, -1, excluded.query_P - first)
    return ExcludedPairs(query_P=query_P, row_P=excluded.row_P)


def _launch(queries_BD: torch.Tensor, index: IndexRows, k: int, excluded: ExcludedPairs | None) -> torch.Tensor:
    num_queries = len(queries_BD)
    dim = queries_BD.shape[1]
    num_groups = -(-len(index) // GROUP)
    queries_BD, rows_ND = queries_BD.to(index.query_dtype).contiguous(), index.rows_ND
    assert (rows_ND.stride(1), rows_ND.shape[1]) == (1, dim), "elements of a row lie together"
    is_wide = rows_ND.dtype == torch.float32
    device = queries_BD.device
    block_b = max(16, min(16 if is_wide else 64, power_of_two(num_queries)))  # what is not a tensor core's is unrolled
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
        """`packed`"""
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
        """(GROUP, BLOCK_B) scores of a group's rows, the same to the bit wherever they are computed."""
        b, n = first_query + tl.arange(0, BLOCK_B), group * GROUP + tl.arange(0, GROUP)
        d = tl.arange(0, BLOCK_D)
        here = rows + (group * GROUP).to(tl.int64) * row_stride
        local = tl.arange(0, GROUP)[:, None].to(tl.int64) * row_stride
        scores = tl.zeros((GROUP, BLOCK_B), tl.float32)
        for start in range(0, DIM, BLOCK_D):
            column = start + d
            is_row = (n < num_rows)[:, None] & (column < DIM)[None, :]
            is_query = (column < DIM)[:, None] & (b < num_queries)[None, :]
            vectors = tl.load(here + local + column[None, :], mask=is_row, other=0.0)
            asked = tl.load(queries + b[None, :] * DIM + column[:, None], mask=is_query, other=0.0)
            scores = tl.dot(vectors.to(asked.dtype), asked, scores, input_precision="ieee")
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
        # Blocks of queries are next to each other, so that all of them find a group's rows in the second-level cache.
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
        query, place = tl.program_id(0), tl.program_id(1)
        at = query.to(tl.int64) * num_chosen + place
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
