"""The global batch of a step is a pure function of (seed, epoch, step), for any ranks, workers and resume point."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestrec.data.batch_loader import BatchConfig, BatchLoader, Collator, MicroBatch
from nestrec.data.batch_order import BatchPosition, contiguous_bounds, cuts_by_tokens, epoch_order
from nestrec.data.dataset import DatasetRows


class NumberCollator(Collator):
    """Collator of samples that have an index and a number of tokens only."""

    def __init__(self, tokens):
        self.tokens = np.asarray(tokens, dtype=np.int64)
        self.weights = self.tokens.astype(np.float64)

    def read(self, samples):
        return DatasetRows(samples, {}, {})

    def collate(self, samples, rows, epoch):
        assert np.array_equal(rows.indices, samples)
        return MicroBatch(samples, {}, {}, max_length=0, num_tokens=int(self.tokens[samples].sum()))


def batches_of(tokens, *, rank=0, world=1, workers=1, seed=3, **limit):
    cfg = BatchConfig(**({"batch_size": None} | limit), num_workers=workers, num_micro_batches=2)
    return BatchLoader(NumberCollator(tokens), cfg, seed=seed, rank=rank, world=world)


batch_limits = st.one_of(
    st.builds(lambda n: {"batch_size": n}, st.integers(1, 17)),
    st.builds(lambda n: {"batch_tokens": n}, st.integers(1, 60)),
)
token_lists = st.lists(st.integers(1, 30), min_size=1, max_size=60)


@given(st.integers(1, 300), st.integers(0, 2**40), st.integers(0, 5), st.one_of(st.none(), st.integers(1, 50)))
def test_epoch_order_holds_each_sample_once(num_samples, seed, epoch, block_size):
    order = epoch_order(num_samples, seed, epoch, block_size=block_size)
    assert sorted(order.tolist()) == list(range(num_samples))


def test_epoch_order_differs_by_epoch_and_seed():
    orders = {tuple(epoch_order(50, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_epoch_order_blocked_shuffles_blocks_and_their_samples():
    blocks = set()
    insides = set()
    for epoch in range(3):
        order = epoch_order(100, 1, epoch, block_size=10).reshape(10, 10)
        for block in order:
            assert len({int(i) // 10 for i in block}) == 1
        blocks.add(tuple(order[:, 0] // 10))
        insides.add(tuple(order[0] % 10))
    assert len(blocks) == len(insides) == 3
    assert tuple(range(10)) not in blocks | insides


@given(token_lists, batch_limits)
def test_global_batches_of_an_epoch_hold_each_sample_once(tokens, limit):
    order = batches_of(tokens, seed=5, **limit).order
    samples = np.concatenate([order.samples(BatchPosition(2, s)) for s in range(order.steps_in_epoch(2))])
    assert sorted(samples.tolist()) == list(range(len(tokens)))


@given(token_lists, st.integers(1, 60))
def test_token_batches_stay_within_their_limit(tokens, batch_tokens):
    bounds = cuts_by_tokens(np.array(tokens), batch_tokens)
    for a, b in itertools.pairwise(bounds):
        assert sum(tokens[a:b]) <= batch_tokens or b == a + 1


@given(token_lists, batch_limits, st.integers(1, 3), st.data())
def test_global_batches_ignore_ranks_workers_and_resume_point(tokens, limit, workers, data):
    reference = batches_of(tokens, **limit)
    num_steps = reference.order.steps_in_epoch(0) + reference.order.steps_in_epoch(1)
    start = data.draw(st.integers(0, num_steps - 1))
    position = BatchPosition()
    for _ in range(start):
        position = reference.order.next_position(position)
    for world in (1, 2, 4, 8):
        options = {"world": world, "workers": workers} | limit
        ranks = [batches_of(tokens, rank=r, **options).iterate_from(position) for r in range(world)]
        expected = position
        for _ in range(min(3, num_steps - start)):
            parts = [next(rank) for rank in ranks]
            expected_samples = reference.order.samples(expected)
            assert all(
                part.position == expected and np.array_equal(part.global_samples, expected_samples) for part in parts
            )
            computed = np.concatenate([m.sample_ids for part in parts for m in part.micro_batches])
            assert np.array_equal(computed, expected_samples)
            assert {part.weight for part in parts} == {float(np.array(tokens)[expected_samples].sum())}
            expected = reference.order.next_position(expected)
        for rank in ranks:
            rank.close()


@given(st.integers(0, 100), st.integers(1, 9))
def test_contiguous_bounds_are_near_equal(num_samples, num_shares):
    sizes = np.diff(contiguous_bounds(num_samples, num_shares))
    assert sizes.sum() == num_samples
    assert sizes.max() - sizes.min() <= 1


def test_batch_loader_reraises_worker_errors():
    class FailingCollator(NumberCollator):
        def collate(self, samples, rows, epoch):
            raise ValueError("a bad row")

    batches = BatchLoader(FailingCollator([1, 2, 3]), BatchConfig(batch_size=2), seed=0, rank=0, world=1)
    with pytest.raises(ValueError, match="a bad row"):
        next(batches.iterate_from(BatchPosition()))


def test_token_batches_are_filled_up_to_the_limit():
    assert cuts_by_tokens(np.array([3, 3, 4, 2, 7, 1]), 6).tolist() == [0, 2, 4, 5, 6]


def test_shuffle_block_size_option_limits_the_shuffle():
    def spread(block):
        first = batches_of(np.ones(100, dtype=np.int64), batch_size=10, shuffle_block_size=block).order.samples(
            BatchPosition()
        )
        return int(np.ptp(first))

    assert spread(10) == 9
    assert spread(None) > 50
