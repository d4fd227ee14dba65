"""The global batch of a step is a pure function of (seed, epoch, step), whatever the ranks, workers or resume point."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestrec.data.batch_loader import BatchConfig, BatchLoader, Collator, MicroBatch
from nestrec.data.batch_order import BatchPosition, GlobalBatchSampler, contiguous_shares, cuts_by_tokens, epoch_order
from nestrec.data.dataset import DatasetRows


class Numbers(Collator):
    """Samples that are only their numbers."""

    def __init__(self, tokens):
        self.tokens = np.asarray(tokens, dtype=np.int64)
        self.weights = self.tokens.astype(np.float64)

    def read(self, samples):
        return DatasetRows(samples, {}, {})

    def assemble(self, samples, rows, epoch):
        assert np.array_equal(rows.indices, samples)
        return MicroBatch(samples, {}, {}, max_length=0, num_tokens=int(self.tokens[samples].sum()))


def batches_of(tokens, *, rank=0, world=1, workers=1, seed=3, **cut):
    cfg = BatchConfig(**({"batch_samples": None} | cut), workers=workers, micro_batches=2)
    return BatchLoader(Numbers(tokens), cfg, seed=seed, rank=rank, world=world)


cuts = st.one_of(
    st.builds(lambda n: {"batch_samples": n}, st.integers(1, 17)),
    st.builds(lambda n: {"batch_tokens": n}, st.integers(1, 60)),
)
token_lists = st.lists(st.integers(1, 30), min_size=1, max_size=60)


@given(st.integers(1, 300), st.integers(0, 2**40), st.integers(0, 5), st.one_of(st.none(), st.integers(1, 50)))
def test_an_epoch_holds_every_sample_exactly_once(num_samples, seed, epoch, block_size):
    order = epoch_order(num_samples, seed, epoch, block_size=block_size)
    assert sorted(order.tolist()) == list(range(num_samples))


def test_epochs_and_seeds_differ():
    orders = {tuple(epoch_order(50, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_a_blocked_order_stays_inside_blocks_and_both_are_shuffled():
    blocks, insides = set(), set()
    for epoch in range(3):
        order = epoch_order(100, 1, epoch, block_size=10).reshape(10, 10)
        for block in order:
            assert len({int(i) // 10 for i in block}) == 1
        blocks.add(tuple(order[:, 0] // 10))
        insides.add(tuple(order[0] % 10))
    assert len(blocks) == len(insides) == 3
    assert tuple(range(10)) not in blocks | insides


@given(token_lists, cuts)
def test_the_batches_of_an_epoch_hold_every_sample_once(tokens, cut):
    order = GlobalBatchSampler(np.array(tokens), seed=5, **cut)
    seen = np.concatenate([order.samples(BatchPosition(2, s)) for s in range(order.steps_in_epoch(2))])
    assert sorted(seen.tolist()) == list(range(len(tokens)))


@given(token_lists, st.integers(1, 60))
def test_token_batches_stay_within_their_tokens_unless_one_sample_is_larger(tokens, batch_tokens):
    bounds = cuts_by_tokens(np.array(tokens), batch_tokens)
    for a, b in itertools.pairwise(bounds):
        assert sum(tokens[a:b]) <= batch_tokens or b == a + 1


@given(token_lists, cuts, st.integers(1, 3), st.data())
def test_global_batches_do_not_depend_on_ranks_workers_or_the_resume_point(tokens, cut, workers, data):
    reference = batches_of(tokens, **cut)
    num_steps = reference.order.steps_in_epoch(0) + reference.order.steps_in_epoch(1)
    start = data.draw(st.integers(0, num_steps - 1))
    position = BatchPosition()
    for _ in range(start):
        position = reference.order.after(position)
    for world in (1, 2, 4, 8):
        alike = {"world": world, "workers": workers} | cut
        ranks = [batches_of(tokens, rank=r, **alike).starting_at(position) for r in range(world)]
        expected = position
        for _ in range(min(3, num_steps - start)):
            parts = [next(rank) for rank in ranks]
            whole = reference.order.samples(expected)
            assert all(part.position == expected and np.array_equal(part.global_samples, whole) for part in parts)
            computed = np.concatenate([m.sample_ids for part in parts for m in part.micro_batches])
            assert np.array_equal(computed, whole)
            assert {part.weight for part in parts} == {float(np.array(tokens)[whole].sum())}
            expected = reference.order.after(expected)
        for rank in ranks:
            rank.close()


@given(st.integers(0, 100), st.integers(1, 9))
def test_shares_are_near_equal(num_samples, num_shares):
    sizes = np.diff(contiguous_shares(num_samples, num_shares))
    assert sizes.sum() == num_samples
    assert sizes.max() - sizes.min() <= 1


def test_an_error_of_a_worker_reaches_the_loop():
    class Broken(Numbers):
        def assemble(self, samples, rows, epoch):
            raise ValueError("a bad row")

    batches = BatchLoader(Broken([1, 2, 3]), BatchConfig(batch_samples=2), seed=0, rank=0, world=1)
    with pytest.raises(ValueError, match="a bad row"):
        next(batches.starting_at(BatchPosition()))


def test_a_token_batch_takes_what_just_fits():
    assert cuts_by_tokens(np.array([3, 3, 4, 2, 7, 1]), 6).tolist() == [0, 2, 4, 5, 6]


def test_the_block_of_the_shuffle_is_an_option_of_batches():
    def spread(block):
        first = batches_of(np.ones(100, dtype=np.int64), batch_samples=10, shuffle_block=block).order.samples(
            BatchPosition()
        )
        return int(np.ptp(first))

    assert spread(10) == 9
    assert spread(None) > 50
