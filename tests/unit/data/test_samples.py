"""Splits, slices of flat arrays, stochastic length and uniform negatives."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nestrec.base.random import fold
from nestrec.data.flat_arrays import positions, sample_keys, slice_index, token_keys
from nestrec.data.samples.negative_sampling import uniform_negatives
from nestrec.data.samples.split import sample_events, split_by_time, split_leave_one_out, stochastic_length


def test_split_leave_one_out_holds_out_the_last_two_events():
    split = split_leave_one_out(np.array([5, 3, 2, 1], dtype=np.int32))
    assert split.train_end.tolist() == [3, 1, 2, 1]
    assert split.users_with("valid").tolist() == [0, 1]
    assert [a.tolist() for a in split.held_out("test")] == [[4, 2, 2, 1], [5, 3, 2, 1]]


def test_split_by_time_cuts_each_user_at_the_same_time():
    times = np.array([1, 5, 9, 2, 3, 8, 9])
    split = split_by_time(times, np.array([0, 3, 5, 7]), valid_from_ms=4, test_from_ms=9)
    assert split.train_end.tolist() == [1, 2, 0]
    assert split.valid_end.tolist() == [2, 2, 1]
    assert split.test_end.tolist() == [3, 2, 2]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10)), max_size=20))
def test_slice_index_concatenates_ranges(pairs):
    first = np.array([a for a, _ in pairs], dtype=np.int64)
    end = np.array([a + n for a, n in pairs], dtype=np.int64)
    index, offsets = slice_index(first, end)
    assert index.tolist() == [i for a, n in pairs for i in range(a, a + n)]
    assert positions(offsets).tolist() == [i for _, n in pairs for i in range(n)]


def test_token_keys_do_not_depend_on_the_batch_around_a_sample():
    offsets = np.array([0, 3, 5])
    both = token_keys(sample_keys(1, 2, np.array([7, 9])), offsets)
    alone = token_keys(sample_keys(1, 2, np.array([9])), np.array([0, 2]))
    assert both[3:].tolist() == alone.tolist()
    assert alone.tolist() == [fold(1, 2, 9, 0), fold(1, 2, 9, 1)]
    assert len(set(both.tolist())) == 5


def test_stochastic_length_keeps_short_and_cuts_long_histories():
    key = sample_keys(0, 0, np.arange(4000))
    short = stochastic_length(np.full(4000, 20), key, alpha=1.6, longest=256)
    assert (short == 20).all()
    n = 200
    long = stochastic_length(np.full(4000, n), key, alpha=1.6, longest=256)
    assert set(long.tolist()) == {int(256**0.8), n}
    expected = 256**1.6 / n**2
    assert abs((long == n).mean() - expected) < 4 * np.sqrt(expected * (1 - expected) / 4000)


@given(st.integers(2, 300), st.integers(2, 300), st.integers(0, 2**63))
def test_sampled_events_are_sorted_unique_and_end_with_newest(num_events, num_sampled, key):
    sampled = sample_events(num_events, num_sampled, key)
    assert len(sampled) == min(num_events, num_sampled)
    assert (np.diff(sampled) > 0).all()
    assert sampled[-1] == num_events - 1
    assert sampled[0] >= 0


def test_sampled_events_include_newest_target_and_context():
    assert all(sample_events(50, 2, key).tolist() == [48, 49] for key in range(50))
    assert all({48, 49} <= set(sample_events(50, 5, key).tolist()) for key in range(50))


def test_sampled_events_favor_recent_events():
    counts = np.zeros(100)
    for key in range(500):
        counts[sample_events(100, 20, key)] += 1
    assert counts[50:].sum() > 1.5 * counts[:50].sum()


def test_uniform_negatives_are_a_function_of_the_token():
    key = sample_keys(5, 1, np.arange(2000))
    negatives = uniform_negatives(key, 16, 37)
    assert negatives.min() == 1
    assert negatives.max() == 37
    count = np.bincount(negatives.reshape(-1), minlength=38)[1:]
    assert ((count - 32000 / 37) ** 2 / (32000 / 37)).sum() < 80  # chi squared, 36 degrees of freedom, p about 3e-5
    assert np.array_equal(uniform_negatives(key[100:101], 16, 37), negatives[100:101])
