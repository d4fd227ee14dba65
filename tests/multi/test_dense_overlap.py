"""Sums of dense gradients begin inside the last backward pass, and change neither a bit nor the order of ranks."""

import pytest
from dense_jobs import THREE_BUCKETS, gradient_in_two_parts, spans_of_paused_backward, train_late_and_early
from schedule_jobs import Job, train

from support.rank_pool import RankFailure

EXACT = ["dual_buffer", "frozen_window", "nested", "priority"]
SMALL = Job(num_steps=4, num_micro_batches=2, ranks=THREE_BUCKETS, shares=(7, 0, 1, 4))
"""One rank has no samples, and so no backward pass."""


def test_early_sums_change_no_bit_of_any_schedule_and_stay_equal_to_serial(pools):
    names = ["serial", "semi_async", *EXACT]
    ranks = pools[4].run(train_late_and_early, names, SMALL)
    for results in ranks:
        for name, (early, late) in zip(names, results, strict=True):
            for what in ("tables", "dense", "losses", "seen"):
                assert early[what] == late[what], name
                assert name == "semi_async" or early[what] == results[0][0][what], name
            is_moved = name in EXACT  # the sums go before the last gradients of rows, where a step ends with these
            assert (early["issued"] != late["issued"]) == is_moved, name
            assert sorted(early["issued"]) == sorted(late["issued"])
    for rank in ranks[1:]:
        for mine, first in zip(rank, ranks[0], strict=True):
            assert [result["issued"] for result in mine] == [result["issued"] for result in first]


def test_all_but_the_last_bucket_go_before_the_last_gradients_of_rows(pools):
    issued = pools[4].run(train, "frozen_window", SMALL)[0]["issued"]
    step = issued[: len(issued) // SMALL.num_steps]
    assert step[-5:] == ["dense.all_reduce"] * 2 + ["vectors.all_to_all"] + ["dense.all_reduce"] * 2


@pytest.mark.parametrize("schedule", ["nested", "semi_async"])
def test_the_sum_of_the_last_layer_lies_inside_the_backward_pass(pools, schedule):
    for spans in pools[4].run(spans_of_paused_backward, schedule):
        (backward,) = (s for s in spans if s.name == "train.compute" and s.micro_batch == 1)
        sums = sorted((s for s in spans if s.name == "train.dense.reduce"), key=lambda s: s.start_ns)
        assert len(sums) == 3, "two early ones, and the rest with the loss"
        assert backward.start_ns < sums[0].start_ns < backward.end_ns, "and it has gone on when that sum was done"
        assert sums[2].start_ns > backward.end_ns


def test_a_gradient_that_comes_in_two_parts_is_refused_with_the_option_to_set(pools):
    for outcome in pools[4].outcomes(gradient_in_two_parts):
        assert isinstance(outcome, RankFailure)
        assert outcome.kind == "UserError"
        assert "ranks.dense_overlap" in outcome.text
