"""Row kernels equal their reference implementations. Under TRITON_INTERPRET=1 the same tests run on a CPU."""

import numpy as np
import pytest
import torch

from nestrec.ops.embedding.dedup_keys import dedup_keys, dedup_keys_reference
from nestrec.ops.embedding.row_copy import (
    RowList,
    Spans,
    TargetGroups,
    add_spans,
    gather_spans,
    group,
    move_rows,
    move_rows_reference,
    scatter_spans,
)
from nestrec.ops.embedding.row_gather import gather_rows, take_rows
from nestrec.ops.embedding.row_sum import sum_by_index, sum_by_index_reference
from nestrec.ops.embedding.row_update import KINDS, RowRule, update_rows, update_rows_reference
from nestrec.ops.embedding.stochastic_rounding import store_rounded
from nestrec.ops.kernel_op import IS_INTERPRETED

pytestmark = pytest.mark.gpu
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("mode", ["gather", "scatter", "both", "neither"])
@pytest.mark.parametrize(("width", "index_dtype"), [(1, torch.int32), (37, torch.int64), (132, torch.int32)])
def test_move_rows_equals_reference(width, mode, index_dtype):
    torch.manual_seed(width)
    source = words(300, width + width % 4)[:, :width]
    slots = torch.randint(-1, 300, (200,), device=DEVICE, dtype=index_dtype)
    targets = torch.randperm(310, device=DEVICE)[:200].to(index_dtype)
    targets[7] = -1
    index = (slots if mode in ("gather", "both") else None, targets if mode in ("scatter", "both") else None)
    found, expected = (torch.full((310, width), 7, dtype=torch.int32, device=DEVICE) for _ in range(2))
    move_rows(source, found, *index)
    move_rows_reference(source, expected, *index)
    assert torch.equal(found, expected)


def test_row_kernels_accept_empty_input():
    target = words(5, 4)
    before = target.clone()
    move_rows(words(3, 4), target, torch.empty(0, dtype=torch.int64, device=DEVICE))
    assert torch.equal(target, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
def test_span_kernels_of_several_tables_equal_loop(dtype):
    draw = np.random.default_rng(5)
    device = torch.device(DEVICE)
    widths, gaps, num_rows = np.array([3, 1, 40, 5]), np.array([0, 3, 8, 0]), np.array([9, 6, 4, 2])
    strides = widths + gaps
    starts = np.concatenate([[0], np.cumsum(strides * num_rows)[:-1]])
    starts[1] = -1
    tables = draw.integers(0, 4, 150).astype(np.int32)
    slots = (draw.integers(0, 1 << 30, 150) % num_rows[tables]).astype(np.int32)
    before = torch.from_numpy(draw.standard_normal(int((strides * num_rows).sum())) * 100).to(dtype)
    spans = Spans.of(starts, strides, widths, device)
    rows = RowList.of(tables, slots, widths, device)
    run = before.to(DEVICE)
    packed = torch.zeros(rows.num_elements, dtype=dtype, device=DEVICE)
    gather_spans(run, spans, rows, packed)
    values = torch.from_numpy(draw.standard_normal(rows.num_elements) * 100).to(dtype)
    taken = torch.zeros_like(packed, device="cpu")
    summed = before.clone()
    for i, (table, slot) in enumerate(zip(tables, slots, strict=True)):
        if starts[table] >= 0:
            start = starts[table] + slot * strides[table]
            target = rows.offsets[i]
            taken[target : target + widths[table]] = before[start : start + widths[table]]
            summed[start : start + widths[table]] += values[target : target + widths[table]]
    assert torch.equal(packed.cpu(), taken)
    found = [torch.from_numpy(a).to(DEVICE) for a in group(tables, slots, np.concatenate([[0], np.cumsum(num_rows)]))]
    add_spans(values.to(DEVICE), rows, run, spans, TargetGroups(*found))
    assert torch.equal(run.cpu(), summed)
    back = torch.full_like(run, 7)
    scatter_spans(packed, rows.slice_rows(0, 0), back, spans)
    first = [int(i) for i in np.unique(tables.astype(np.int64) * 100 + slots, return_index=True)[1]]
    once = RowList.of(tables[first], slots[first], widths, device)
    alone = torch.zeros(once.num_elements, dtype=dtype, device=DEVICE)
    gather_spans(run, spans, once, alone)
    scatter_spans(alone, once, back, spans)
    add_spans(alone, once, back, spans)
    again = torch.full_like(summed, 7)
    for table, slot in zip(once.tables, once.indices, strict=True):
        if starts[table] >= 0:
            start = starts[table] + slot * strides[table]
            again[start : start + widths[table]] = 2 * summed[start : start + widths[table]]
    assert torch.equal(back.cpu(), again)


def zipf_indices(num_rows: int, num_positions: int, exponent: float = 1.05) -> torch.Tensor:
    """Return row indices from a Zipf distribution: some rows are never used, one is used very often."""
    mass = torch.arange(1, num_rows + 1, dtype=torch.float64).pow(-exponent).cumsum(0)
    slots = torch.searchsorted(mass, torch.rand(num_positions, dtype=torch.float64) * mass[-1])
    return torch.randperm(num_rows)[slots.clamp(max=num_rows - 1)].to(torch.int32).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "num_positions", "dim"), [(40, 3000, 8), (1, 1500, 5), (300, 200, 37), (3, 0, 4)])
def test_sum_by_index_is_bitwise_identical_to_reference(num_rows, num_positions, dim, dtype):
    torch.manual_seed(num_rows)
    index = zipf_indices(num_rows, num_positions)
    grad = torch.randn(num_positions, dim, device=DEVICE).to(dtype)
    wide = grad.to(torch.promote_types(dtype, torch.float32)).cpu()
    assert torch.equal(sum_by_index(grad, index, num_rows).cpu(), sum_by_index_reference(wide, index.cpu(), num_rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 37])
def test_take_rows_accepts_strided_rows(dim, dtype):
    rows = torch.randn(50, dim + 3, device=DEVICE).to(dtype)[:, :dim]
    index = torch.randint(0, 50, (70,), device=DEVICE)
    assert torch.equal(take_rows(rows, index), rows[index])


def columns_of(kind: str, num_rows: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the weight and the state columns; the states are strided columns of one tensor."""
    widths = {"adagrad": [dim], "rowwise_adagrad": [1], "adam": [dim, dim], "rowwise_adam": [dim, 1]}.get(kind, [])
    states = list(torch.rand(num_rows, sum(widths) + 3, device=DEVICE)[:, : sum(widths)].split(widths, 1))
    return [torch.randn(num_rows, dim, device=DEVICE).to(dtype), *(states if widths else [])]


@pytest.mark.parametrize(("dim", "dtype"), [(1, torch.float16), (16, torch.float32), (37, HALF)])
@pytest.mark.parametrize("kind", KINDS)
def test_update_rows_is_bitwise_identical_to_reference(kind, dim, dtype):
    torch.manual_seed(dim)
    rule = RowRule(kind=kind, learning_rate=0.03, eps=1e-6, decay1=0.1, decay2=0.001, inverse_scale=1 / 3)
    columns = columns_of(kind, 60, dim, dtype)
    expected = [column.clone().cpu() for column in columns]
    grad = torch.randn(50, dim, device=DEVICE)
    index = torch.randperm(60, device=DEVICE)[:50]
    index[3] = -1
    update_rows(columns[0], columns[1:], grad, rule, index)
    is_valid = index.cpu() >= 0
    picked = [column[index.cpu()[is_valid]] for column in expected]
    update_rows_reference(picked[0], picked[1:], grad.cpu()[is_valid], rule)
    for column, values, found in zip(expected, picked, columns, strict=True):
        column[index.cpu()[is_valid]] = values
        assert torch.equal(found.cpu(), column)


ODD_VALUES = [
    0.0,
    -0.0,
    6e-8,
    -3e-8,
    1e-12,
    1e-42,
    6.1e-5,
    -6.09e-5,
    65504.0,
    65519.0,
    1e5,
    -1e30,
    3.4e38,
    float("inf"),
    float("-inf"),
    float("nan"),
]
"""Values to round, with subnormal and too large numbers of both dtypes."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "dim", "has_index"), [("sgd", 16, False), ("rowwise_adagrad", 37, True), ("adam", 16, True)]
)
def test_half_precision_row_update_rounding_is_bitwise(kind, dim, has_index, dtype):
    """The kernel, the reference and the CPU loop round identically."""
    torch.manual_seed(dim)
    rule = RowRule(kind=kind, learning_rate=0.03, eps=1e-6, decay1=0.1, decay2=0.001, inverse_scale=1 / 3)
    columns = columns_of(kind, 60, dim, dtype)
    columns[0][5] = torch.tensor(ODD_VALUES)[torch.arange(dim) % 16].to(dtype)
    expected = [column.clone().cpu() for column in columns]
    grad = torch.randn(60, dim, device=DEVICE)
    index = torch.randperm(60, device=DEVICE) if has_index else None
    grad[:5] *= 1e-3
    draws = torch.randint(-(2**63), 2**63 - 1, (60,), device=DEVICE)
    update_rows(columns[0], columns[1:], grad, rule, index, draw_P=draws)
    order = torch.arange(60) if index is None else index.cpu()
    picked = [column[order] for column in expected]
    wide = [picked[0].float(), *(column.clone() for column in picked[1:])]
    update_rows_reference(picked[0], picked[1:], grad.cpu(), rule, draws.cpu())
    update_rows_reference(wide[0], wide[1:], grad.cpu(), rule)
    by_loop = torch.empty_like(picked[0])
    store_rounded(wide[0], draws.cpu(), by_loop)
    assert torch.equal(by_loop.view(torch.int16), picked[0].view(torch.int16))
    for column, values, found in zip(expected, picked, columns, strict=True):
        column[order] = values
        assert torch.equal(found.cpu().view(torch.int16), column.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("num_keys", "num_positions"), [(50, 3000), (5000, 4097), (1, 10), (7, 1), (3, 0)])
def test_dedup_keys_equals_reference(num_keys, num_positions, dtype):
    torch.manual_seed(num_keys)
    keys = (zipf_indices(num_keys, num_positions) - num_keys // 2).to(dtype)
    found = dedup_keys(keys)
    expected = dedup_keys_reference(keys)
    count = int(found.count)
    assert count == int(expected.count)
    assert torch.equal(found.keys_P[:count], expected.keys_P[:count])
    assert torch.equal(found.starts[: count + 1], expected.starts[: count + 1])
    assert torch.equal(found.order_P, expected.order_P)
    assert torch.equal(found.rows_P, expected.rows_P)
    assert torch.equal(found.keys_P[found.inverse().long()], keys)


def test_row_gradient_of_plain_sum_is_reduced():
    """Autograd passes the gradient of a sum as one expanded number."""
    rows = torch.zeros(5, 8, device=DEVICE, requires_grad=True)
    index = torch.tensor([1, 3, 3], device=DEVICE)
    gather_rows(rows, index).sum().backward()
    assert rows.grad[:, 0].tolist() == [0, 1, 0, 2, 0]
