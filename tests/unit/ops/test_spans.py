"""Span operators on the rows of several tables in one buffer equal a loop over tables and rows."""

import itertools

import numpy as np
import pytest
import torch

from nestrec.ops.embedding.row_copy import RowList, Spans, TargetGroups, add_spans, gather_spans, group, scatter_spans

CPU = torch.device("cpu")


def example(seed: int, dtype: torch.dtype = torch.float32):
    """Return a buffer of tables with several widths and strides, and a list of rows in random order with repetitions.

    If the seed is odd, one table is not in the buffer.
    """
    draw = np.random.default_rng(seed)
    widths = np.array([3, 1, 8, 5])
    strides = widths + np.array([0, 3, 2, 0])
    num_rows = np.array([4, 6, 2, 3])
    starts = np.concatenate([[0], np.cumsum(strides * num_rows)[:-1]])
    buffer = torch.from_numpy(draw.standard_normal(int((strides * num_rows).sum()))).to(dtype)
    tables = draw.integers(0, 4, 40).astype(np.int32)
    indices = (draw.integers(0, 1 << 30, 40) % num_rows[tables]).astype(np.int32)
    starts[3] = -1 if seed % 2 else starts[3]
    return buffer, Spans.of(starts, strides, widths, CPU), RowList.of(tables, indices, widths, CPU), num_rows


def elements(spans: Spans, rows: RowList):
    """Yield (index in the buffer, index in the packed rows) of every element, in order."""
    for i, (table, index) in enumerate(zip(rows.tables, rows.indices, strict=True)):
        for j in range(spans.widths[table] if spans.starts[table] >= 0 else 0):
            yield spans.starts[table] + index * spans.strides[table] + j, rows.offsets[i] - rows.offsets[0] + j


@pytest.mark.parametrize("seed", range(4))
def test_span_operators_equal_loop_over_elements(seed):
    buffer, spans, rows, _ = example(seed)
    for part in (rows, rows.slice_rows(7, 31), rows.slice_rows(5, 5)):
        packed = torch.zeros(part.num_elements)
        gather_spans(buffer, spans, part, packed)
        expected_packed = torch.zeros_like(packed)
        for source, target in elements(spans, part):
            expected_packed[target] = buffer[source]
        assert torch.equal(packed, expected_packed)
        values = torch.randn(part.num_elements)
        summed = buffer.clone()
        expected = buffer.clone()
        add_spans(values, part, summed, spans)
        for source, target in elements(spans, part):
            expected[source] += values[target]
        assert torch.equal(summed, expected)
        back = torch.full_like(buffer, 7.0)
        scatter_spans(packed, part, back, spans)
        again = torch.full_like(buffer, 7.0)
        for source, target in elements(spans, part):
            again[source] = packed[target]
        assert torch.equal(back, again)


def test_span_groups_list_rows_of_each_target_in_order():
    _, _, rows, num_rows = example(2)
    order, starts = group(rows.tables, rows.indices, np.concatenate([[0], np.cumsum(num_rows)]))
    assert sorted(order.tolist()) == list(range(40))
    found = [order[a:b].tolist() for a, b in itertools.pairwise(starts)]
    expected: dict[tuple[int, int], list[int]] = {}
    for i, key in enumerate(zip(rows.tables.tolist(), rows.indices.tolist(), strict=True)):
        expected.setdefault(key, []).append(i)
    assert found == [expected[key] for key in sorted(expected)]
    assert TargetGroups.of(rows, num_rows, CPU) is None
