"""Whole rows from place to place in one launch: gather, scatter, and copy between two buffers.

    target[to[i], :] = source[from[i], :]    for all i with from[i] >= 0 and to[i] >= 0

Rows are runs of int32 words whose meaning nobody here knows, weight and optimiser state together, so nothing of a row
can be left behind. Without `from` (or `to`) row i is taken from (put to) place i. Rows move in pieces of 16 bytes,
dealt to threads without regard to where a row ends, so that rows of any width keep all threads busy.

Shapes: N source rows, M target rows, W words of a row, P moved rows.
"""

import torch

from nestrec.ops.kernel_op import kernel_op
from nestrec.ops.registry import HAS_TRITON, runs_triton

_PIECE_WORDS = 4
_BLOCK_PIECES = 512
_NUM_WARPS = 8


def move_rows(
    source_NW: torch.Tensor,
    target_MW: torch.Tensor,
    source_index_P: torch.Tensor | None = None,
    target_index_P: torch.Tensor | None = None,
) -> None:
    """Move rows of int32 words; negative places are skipped, target places are distinct.

    Rows may be strided. The index tensors are int32 or int64, on the rows' device.
    """
    _run(source_NW, target_MW, source_index_P, target_index_P)


def move_rows_reference(
    source_NW: torch.Tensor,
    target_MW: torch.Tensor,
    source_index_P: torch.Tensor | None = None,
    target_index_P: torch.Tensor | None = None,
) -> None:
    """The definition."""
    count = _num_moved(source_NW, target_MW, source_index_P, target_index_P)
    every = torch.arange(count, device=source_NW.device)
    source = every if source_index_P is None else source_index_P.long()
    target = every if target_index_P is None else target_index_P.long()
    moved = (source >= 0) & (target >= 0)
    target_MW[target[moved]] = source_NW[source[moved]]


def _num_moved(
    source_NW: torch.Tensor,
    target_MW: torch.Tensor,
    source_index_P: torch.Tensor | None,
    target_index_P: torch.Tensor | None,
) -> int:
    if source_index_P is not None:
        return len(source_index_P)
    return len(target_index_P) if target_index_P is not None else min(len(source_NW), len(target_MW))


def _check(source_NW: torch.Tensor, target_MW: torch.Tensor, indices: list[torch.Tensor]) -> None:
    assert source_NW.dtype == target_MW.dtype == torch.int32, "rows are int32 words"
    assert source_NW.shape[1] == target_MW.shape[1], "rows of both sides have the same words"
    assert source_NW.stride(1) == target_MW.stride(1) == 1, "the words of a row lie together"
    assert all(i.dtype in (torch.int32, torch.int64) and i.is_contiguous() for i in indices), "contiguous places"
    assert len({len(i) for i in indices}) <= 1, "a target place for each source place"


@kernel_op("move_rows", fake=lambda *_: None, mutates=("target_MW",))
def _run(
    source_NW: torch.Tensor,
    target_MW: torch.Tensor,
    source_index_P: torch.Tensor | None,
    target_index_P: torch.Tensor | None,
) -> None:
    _check(source_NW, target_MW, [i for i in (source_index_P, target_index_P) if i is not None])
    if runs_triton(source_NW):
        _launch(source_NW, target_MW, source_index_P, target_index_P)
    else:
        move_rows_reference(source_NW, target_MW, source_index_P, target_index_P)


def _launch(
    source_NW: torch.Tensor,
    target_MW: torch.Tensor,
    source_index_P: torch.Tensor | None,
    target_index_P: torch.Tensor | None,
) -> None:
    count, width = _num_moved(source_NW, target_MW, source_index_P, target_index_P), source_NW.shape[1]
    if count == 0 or width == 0:
        return
    aligned = all(x % _PIECE_WORDS == 0 for x in (width, *_word_offsets(source_NW), *_word_offsets(target_MW)))
    piece = _PIECE_WORDS if aligned else 1
    block = max(_BLOCK_PIECES * _PIECE_WORDS // piece, triton.next_power_of_2(width // piece))
    rows_a_block = block // (width // piece)
    with torch.cuda.device_of(source_NW):
        _move_kernel[(triton.cdiv(count, rows_a_block),)](
            source_NW,
            target_MW,
            source_index_P,
            target_index_P,
            count,
            SOURCE_STRIDE=source_NW.stride(0),
            TARGET_STRIDE=target_MW.stride(0),
            PIECES=width // piece,
            PIECE=piece,
            ROWS=rows_a_block,
            BLOCK=block,
            num_warps=_NUM_WARPS,
        )


def _word_offsets(rows: torch.Tensor) -> tuple[int, int]:
    """What decides on the alignment of a row's words."""
    return rows.stride(0), rows.data_ptr() // 4


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _move_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        source,
        target,
        source_index,
        target_index,
        count,
        SOURCE_STRIDE: tl.constexpr,
        TARGET_STRIDE: tl.constexpr,
        PIECES: tl.constexpr,
        PIECE: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        piece = tl.arange(0, BLOCK)
        place = piece // PIECES
        row = tl.program_id(0) * ROWS + place
        inside = (place < ROWS) & (row < count)
        start = (piece % PIECES) * PIECE
        if source_index is None:
            source_row = row.to(tl.int64)
        else:
            source_row = tl.load(source_index + row, mask=inside, other=-1).to(tl.int64)
        if target_index is None:
            target_row = row.to(tl.int64)
        else:
            target_row = tl.load(target_index + row, mask=inside, other=-1).to(tl.int64)
        moved = (inside & (source_row >= 0) & (target_row >= 0))[:, None]
        word = tl.arange(0, PIECE)[None, :]
        words = tl.load(source + (source_row * SOURCE_STRIDE + start)[:, None] + word, mask=moved)
        tl.store(target + (target_row * TARGET_STRIDE + start)[:, None] + word, words, mask=moved)
