"""Overlapping the dense all-reduces with the last backward pass changes no result, and ranks agree on the order."""

import pytest
from dense_jobs import THREE_BUCKETS, gradient_in_two_parts, spans_of_paused_backward, train_late_and_early
from schedule_jobs import Job, train

from support.rank_pool import RankFailure

EXACT = ["dual_buffer", "frozen_window", "nested", "priority"]
SMALL = Job(num_steps=4, num_micro_batches=2, ranks=THREE_BUCKETS, shares=(7, 0, 1, 4))
"""A job in which one rank has no samples and thus no backward pass."""


def test_overlapped_all_reduce_is_bitwise_in_every_schedule(pools):
    names = ["serial", "semi_async", *EXACT]
    ranks = pools[4].run(train_late_and_early, names, SMALL)
    for results in ranks:
        for name, (early, late) in zip(names, results, strict=True):
            for key in ("tables", "dense", "losses", "fence_states"):
                assert early[key] == late[key], name
                assert name == "semi_async" or early[key] == results[0][0][key], name
            is_moved = name in EXACT  # in schedules whose step ends with the last row gradients, the sums precede them
            assert (early["issued"] != late["issued"]) == is_moved, name
            assert sorted(early["issued"]) == sorted(late["issued"])
    for rank in ranks[1:]:
        for pair, expected in zip(rank, ranks[0], strict=True):
            assert [result["issued"] for result in pair] == [result["issued"] for result in expected]


def test_overlapped_all_reduce_bucket_order(pools):
    issued = pools[4].run(train, "frozen_window", SMALL)[0]["issued"]
    step = issued[: len(issued) // SMALL.num_steps]
    assert step[-5:] == ["dense.all_reduce"] * 2 + ["vectors.all_to_all"] + ["dense.all_reduce"] * 2


@pytest.mark.parametrize("schedule", ["nested", "semi_async"])
def test_overlapped_all_reduce_runs_inside_backward(pools, schedule):
    for spans in pools[4].run(spans_of_paused_backward, schedule):
        (backward,) = (s for s in spans if s.name == "train.forward_backward" and s.micro_batch == 1)
        sums = sorted((s for s in spans if s.name == "train.dense.all_reduce"), key=lambda s: s.start_ns)
        assert len(sums) == 3, "two early buckets, and the last bucket with the loss"
        assert backward.start_ns < sums[0].start_ns < backward.end_ns, "the backward pass continued after the first sum"
        assert sums[2].start_ns > backward.end_ns


def test_overlapped_all_reduce_rejects_split_gradients(pools):
    for outcome in pools[4].outcomes(gradient_in_two_parts):
        assert isinstance(outcome, RankFailure)
        assert outcome.kind == "UserError"
        assert "parallel.overlap_grad_reduce" in outcome.text
