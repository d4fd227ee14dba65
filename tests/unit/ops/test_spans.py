"""Rows of several tables in one run of memory: one call does what a loop over tables and rows does."""

import itertools

import numpy as np
import pytest
import torch

from nestrec.ops.embedding.row_copy import RowList, Spans, TargetGroups, add_spans, gather_spans, group, scatter_spans

CPU = torch.device("cpu")


def example(seed: int, dtype: torch.dtype = torch.float32):
    """Tables of several widths and strides, one of them passed over; rows of a list in any order, places repeated."""
    draw = np.random.default_rng(seed)
    widths = np.array([3, 1, 8, 5])
    strides = widths + np.array([0, 3, 2, 0])
    num_rows = np.array([4, 6, 2, 3])
    starts = np.concatenate([[0], np.cumsum(strides * num_rows)[:-1]])
    run = torch.from_numpy(draw.standard_normal(int((strides * num_rows).sum()))).to(dtype)
    tables = draw.integers(0, 4, 40).astype(np.int32)
    places = (draw.integers(0, 1 << 30, 40) % num_rows[tables]).astype(np.int32)
    starts[3] = -1 if seed % 2 else starts[3]
    return run, Spans.of(starts, strides, widths, CPU), RowList.of(tables, places, widths, CPU), num_rows


def elements(spans: Spans, rows: RowList):
    """(place in the run, place where rows lie packed) of every element, in order."""
    for i, (table, place) in enumerate(zip(rows.tables, rows.places, strict=True)):
        for j in range(spans.widths[table] if spans.starts[table] >= 0 else 0):
            yield spans.starts[table] + place * spans.strides[table] + j, rows.offsets[i] - rows.offsets[0] + j


@pytest.mark.parametrize("seed", range(4))
def test_gathered_scattered_and_added_as_by_a_loop_over_elements(seed):
    run, spans, rows, _ = example(seed)
    for part in (rows, rows.part(7, 31), rows.part(5, 5)):
        packed = torch.zeros(part.num_elements)
        gather_spans(run, spans, part, packed)
        wanted = torch.zeros_like(packed)
        for at, to in elements(spans, part):
            wanted[to] = run[at]
        assert torch.equal(packed, wanted)
        values = torch.randn(part.num_elements)
        summed = run.clone()
        expected = run.clone()
        add_spans(values, part, summed, spans)
        for at, to in elements(spans, part):
            expected[at] += values[to]
        assert torch.equal(summed, expected)
        back = torch.full_like(run, 7.0)
        scatter_spans(packed, part, back, spans)
        again = torch.full_like(run, 7.0)
        for at, to in elements(spans, part):
            again[at] = packed[to]
        assert torch.equal(back, again)


def test_groups_hold_the_rows_of_each_place_in_order():
    _, _, rows, num_rows = example(2)
    order, starts = group(rows.tables, rows.places, np.concatenate([[0], np.cumsum(num_rows)]))
    assert sorted(order.tolist()) == list(range(40))
    found = [order[a:b].tolist() for a, b in itertools.pairwise(starts)]
    wanted: dict[tuple[int, int], list[int]] = {}
    for i, key in enumerate(zip(rows.tables.tolist(), rows.places.tolist(), strict=True)):
        wanted.setdefault(key, []).append(i)
    assert found == [wanted[key] for key in sorted(wanted)]
    assert TargetGroups.of(rows, num_rows, CPU) is None
