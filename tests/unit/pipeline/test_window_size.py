"""The model of a frozen window, and the number of micro-batches that follows from it."""

import pytest

from nestrec.data.order import Position
from nestrec.pipeline.window_changes import WindowChange, WindowSchedule
from nestrec.pipeline.window_size import MeasuredWindow, choose_window, fit_window, window_ms


@pytest.mark.parametrize("num_micro_batches", [1, 2, 4, 8, 16])
def test_only_the_first_and_last_exchange_are_exposed_where_they_fit_beside_the_computation(num_micro_batches):
    compute, exchange = 1712.0 / num_micro_batches, 1185.0 / (2 * num_micro_batches)
    window = window_ms([compute] * num_micro_batches, [exchange] * num_micro_batches, [exchange] * num_micro_batches)
    assert window == pytest.approx(1712.0 + 1185.0 / num_micro_batches)


def test_where_communication_takes_longer_it_bounds_the_window():
    window = window_ms([1.0] * 8, [2.0] * 8, [2.0] * 8)
    assert 32.0 <= window <= 32.0 + 2.0


def test_a_fit_gives_back_what_was_measured():
    model = fit_window(MeasuredWindow(2, 110.0, 52.0), MeasuredWindow(8, 140.0, 58.0))
    assert (model.compute_ms, model.compute_part_ms) == pytest.approx((100.0, 5.0))
    assert (model.communication_ms, model.communication_part_ms) == pytest.approx((50.0, 1.0))
    assert fit_window(MeasuredWindow(2, 110.0, 52.0), MeasuredWindow(8, 100.0, 40.0)).compute_part_ms == 0.0


def test_more_micro_batches_are_taken_only_while_they_are_worth_it():
    candidates = (1, 2, 4, 8, 16, 32)
    free = fit_window(MeasuredWindow(2, 100.0, 60.0), MeasuredWindow(8, 100.0, 60.0))
    costly = fit_window(MeasuredWindow(2, 100.0, 60.0), MeasuredWindow(8, 160.0, 60.0))
    nothing_to_hide = fit_window(MeasuredWindow(2, 100.0, 0.0), MeasuredWindow(8, 101.0, 0.0))
    chosen = [choose_window(model, candidates) for model in (free, costly, nothing_to_hide)]
    assert chosen == [16, 2, 1]


def test_changes_hold_from_their_first_batch_on():
    schedule = WindowSchedule(2)
    schedule.add(WindowChange(step=20, first=Position(0, 33), micro_batches=8))
    schedule.add(WindowChange(step=60, first=Position(1, 5), micro_batches=4))
    asked = [Position(0, 32), Position(0, 33), Position(1, 4), Position(1, 5), Position(2, 0)]
    assert [schedule.at(position) for position in asked] == [2, 8, 8, 4, 4]
