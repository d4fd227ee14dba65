"""Gradients of positions to updated rows in one go: deduplicate, sum, update. The sums never reach memory.

    for each distinct key k:  g = sum of grad[p] over all p with keys[p] = k;  row k moves by the rule of the optimiser

Sums are those of nestrec.ops.rows.sum, updates those of nestrec.ops.rows.update, to the bit. One kernel takes the keys
of a single run, several to a program; keys of many runs are summed by two levels, and the second updates.

Shapes: N rows, D elements of a row, P positions.
"""

from collections.abc import Sequence

import torch

from nestrec.ops.registry import HAS_TRITON, define_op
from nestrec.ops.rows.dedup_keys import DistinctKeys, dedup_keys, dedup_keys_reference
from nestrec.ops.rows.sum import MAX_REGISTERS, RUN, sum_by_index, sum_long_runs, sum_type, with_whole_rows
from nestrec.ops.rows.update import RowRule, can_launch, check_columns, kernel_columns, rule_of, update_rows

_WARP_ELEMENTS = 128
_MAX_WARPS = 8
_PROGRAMS_A_PROCESSOR = 32


def learn_rows(
    weight_ND: torch.Tensor, states: Sequence[torch.Tensor], keys_P: torch.Tensor, grad_PD: torch.Tensor, rule: RowRule
) -> None:
    """Update the rows that `keys_P` (0 to N - 1, with repetition) name, in place. The host never waits on CUDA."""
    _op(weight_ND, list(states), keys_P, grad_PD, rule.kind, rule.numbers)


def learn_rows_reference(
    weight_ND: torch.Tensor, states: Sequence[torch.Tensor], keys_P: torch.Tensor, grad_PD: torch.Tensor, rule: RowRule
) -> None:
    """The definition, by its parts."""
    found = dedup_keys_reference(keys_P)
    count = int(found.count)
    sums = sum_by_index(grad_PD, found.inverse(), count)
    update_rows(weight_ND, states, sums, rule, found.keys_P[:count])


def _run(  # noqa: PLR0917
    weight_ND: torch.Tensor, states: list[torch.Tensor], keys_P: torch.Tensor, grad_PD: torch.Tensor, kind: str,
    numbers: list[float],
) -> None:  # fmt: skip
    if len(keys_P) == 0:
        return
    rule = rule_of(kind, numbers)
    if can_launch(weight_ND, states, sum_type(grad_PD.dtype)):
        grad_PD = with_whole_rows(grad_PD)
        check_columns(weight_ND, states, grad_PD, kind)
        keys_P = keys_P.to(torch.int32) if len(weight_ND) < 1 << 31 else keys_P  # half the passes of the sort
        _launch(weight_ND, states, dedup_keys(keys_P), grad_PD, rule)
    else:
        learn_rows_reference(weight_ND, states, keys_P, grad_PD, rule)


def _fake(  # noqa: PLR0917
    weight_ND: torch.Tensor, states: list[torch.Tensor], keys_P: torch.Tensor, grad_PD: torch.Tensor, kind: str,
    numbers: list[float],
) -> None:  # fmt: skip
    return None


_op = define_op(
    "learn_rows(Tensor(a!) weight, Tensor(b!)[] states, Tensor keys, Tensor grad, str kind, float[] numbers) -> ()",
    _run, _fake,
)  # fmt: skip


def _launch(
    weight_ND: torch.Tensor, states: list[torch.Tensor], found: DistinctKeys, grad_PD: torch.Tensor, rule: RowRule
) -> None:
    num_positions, dim = grad_PD.shape
    columns, block = kernel_columns(weight_ND, states, rule), triton.next_power_of_2(dim)
    tile_rows, num_warps = max(1, _WARP_ELEMENTS // block), min(_MAX_WARPS, max(1, block // _WARP_ELEMENTS))
    with torch.cuda.device_of(weight_ND):
        _learn_kernel[(min(triton.cdiv(num_positions, tile_rows), _num_programs(weight_ND.device)),)](
            grad_PD, found.order_P, found.starts, found.keys_P, found.count, **columns,
            GRAD_STRIDE=grad_PD.stride(0), ROWS=tile_rows, RUN_SIZE=RUN, num_warps=num_warps,
            maxnreg=MAX_REGISTERS, enable_fp_fusion=False,
        )  # fmt: skip
        if num_positions > RUN:
            partial = sum_long_runs(grad_PD, found.rows_P, found.order_P, found.starts)
            _learn_long_kernel[(triton.cdiv(num_positions, RUN),)](
                partial, found.rows_P, found.starts, found.keys_P, num_positions, **columns, RUN_SIZE=RUN,
                num_warps=1, enable_fp_fusion=False,
            )  # fmt: skip


def _num_programs(device: torch.device) -> int:
    """How many distinct keys there are is known on the device alone, so programs take tiles until there are no more."""
    if device.type != "cuda":
        return 4
    return _PROGRAMS_A_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


if HAS_TRITON:
    import triton
    import triton.language as tl

    from nestrec.ops.rows.sum import long_row_of_block, sum_partial, sum_tile
    from nestrec.ops.rows.update import load_weight, update_tile

    @triton.jit
    def _learn_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        grad, order, starts, keys, count, weight, first, second, learning_rate, eps, decay1, decay2, inverse_scale,
        inverse_dim, KIND: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
        GRAD_STRIDE: tl.constexpr, WEIGHT_STRIDE: tl.constexpr, FIRST_STRIDE: tl.constexpr,
        SECOND_STRIDE: tl.constexpr, RUN_SIZE: tl.constexpr,
    ):  # fmt: skip
        num_keys = tl.load(count).to(tl.int32)
        for tile in range(tl.program_id(0), (num_keys + ROWS - 1) // ROWS, tl.num_programs(0)):
            place = tile * ROWS + tl.arange(0, ROWS)
            inside = place < num_keys
            start = tl.load(starts + place, mask=inside, other=0)
            length = tl.load(starts + place + 1, mask=inside, other=0) - start
            row = tl.load(keys + place, mask=inside, other=0).to(tl.int64)
            inside = inside & (length <= RUN_SIZE)
            value = load_weight(weight, row, inside, D, BLOCK, WEIGHT_STRIDE)
            tl.debug_barrier()  # or the compiler moves the load behind the sum
            length = tl.where(inside, length, 0)
            gradient = sum_tile(grad, order, start, length, D, GRAD_STRIDE, BLOCK, ROWS, tl.float32)
            update_tile(
                gradient, value, row, inside, weight, first, second, learning_rate, eps, decay1, decay2,
                inverse_scale, inverse_dim, KIND, D, BLOCK, ROWS, WEIGHT_STRIDE, FIRST_STRIDE, SECOND_STRIDE,
            )  # fmt: skip

    @triton.jit
    def _learn_long_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        partial, rows, starts, keys, num_positions, weight, first, second, learning_rate, eps, decay1, decay2,
        inverse_scale, inverse_dim, KIND: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
        WEIGHT_STRIDE: tl.constexpr, FIRST_STRIDE: tl.constexpr, SECOND_STRIDE: tl.constexpr,
        RUN_SIZE: tl.constexpr, UNROLL: tl.constexpr = 8,
    ):  # fmt: skip
        number, start, end = long_row_of_block(rows, starts, tl.program_id(0), num_positions, RUN_SIZE)
        if end > 0:
            row = tl.load(keys + number).to(tl.int64) + tl.zeros([1], tl.int64)
            moved = row >= 0
            value = load_weight(weight, row, moved, D, BLOCK, WEIGHT_STRIDE)
            gradient = sum_partial(partial, start, end, D, BLOCK, RUN_SIZE, UNROLL)
            update_tile(
                gradient, value, row, moved, weight, first, second, learning_rate, eps, decay1, decay2,
                inverse_scale, inverse_dim, KIND, D, BLOCK, 1, WEIGHT_STRIDE, FIRST_STRIDE, SECOND_STRIDE,
            )  # fmt: skip
