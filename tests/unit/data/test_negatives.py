"""Negative samplers: their distributions, their dependence on the token only, and log-Q correction."""

import numpy as np
import pytest
import torch

from nestrec.base.random import fold_array
from nestrec.data.samples.negative_sampling import (
    GroupSampler,
    InBatchSampler,
    PopularitySampler,
    UniformSampler,
    log_q_bias,
    other_tokens,
    shared_tokens,
)

KEYS = fold_array(7, np.arange(4000))
COUNTS = np.array([50, 0, 10, 25, 15])


def test_popularity_sampler_draws_in_proportion_to_counts():
    ids = PopularitySampler(COUNTS, 25, power=1.0, log_q=False).draw(KEYS, KEYS.astype(np.int64)).keys["negative"]
    share = np.bincount(ids.reshape(-1), minlength=6)[1:] / ids.size
    assert share[1] == 0
    assert np.abs(share - COUNTS / COUNTS.sum()).max() < 0.006  # about four standard deviations of 100,000 draws


def test_popularity_sampler_power_zero_is_uniform_over_seen():
    ids = PopularitySampler(COUNTS, 25, power=0.0, log_q=False).draw(KEYS, KEYS.astype(np.int64)).keys["negative"]
    share = np.bincount(ids.reshape(-1), minlength=6)[1:] / ids.size
    assert np.abs(share - np.array([0.25, 0, 0.25, 0.25, 0.25])).max() < 0.006


@pytest.mark.parametrize("log_q", [False, True])
def test_log_q_correction_matches_uniform_sampling(log_q):
    """Compares the mean of exp(logit + bias) over popularity draws with the mean over all items that can be drawn."""
    counts = np.array([50, 30, 10, 25, 15])
    logits = np.array([0.3, -1.0, 0.8, 0.1, -0.4])
    drawn = PopularitySampler(counts, 25, power=1.0, log_q=log_q).draw(KEYS, KEYS.astype(np.int64))
    bias = drawn.tensors["negative_bias"].numpy() if log_q else 0.0
    mean = np.exp(logits[drawn.keys["negative"] - 1] + bias).mean()
    is_right = abs(mean - np.exp(logits).mean()) < 0.01
    assert is_right == log_q


@pytest.mark.parametrize("sampler", [UniformSampler(9, 5), PopularitySampler(COUNTS, 9, power=0.75, log_q=True)])
def test_negative_samples_depend_only_on_the_token(sampler):
    targets = np.ones(len(KEYS), np.int64)
    full = sampler.draw(KEYS, targets)
    part = sampler.draw(KEYS[100:117], targets[100:117])
    assert np.array_equal(full.keys["negative"][100:117], part.keys["negative"])
    for name, tensor in part.tensors.items():
        assert torch.equal(full.tensors[name][100:117], tensor)


def test_in_batch_negatives_are_targets_of_other_tokens():
    targets = np.array([1, 3, 4, 5, 3, 1])
    drawn = InBatchSampler(COUNTS, 40).draw(KEYS[:6], targets)
    token = drawn.tensors["negative_token"].numpy()
    assert not drawn.keys
    assert (token != np.arange(6)[:, None]).all()
    assert set(token.reshape(-1)) == set(range(6))
    expected = log_q_bias(COUNTS.astype(np.float64))[targets - 1][token]
    assert np.array_equal(drawn.tensors["negative_bias"].numpy(), expected)
    assert "negative_bias" not in InBatchSampler(None, 40).draw(KEYS[:6], targets).tensors


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 5, 300])
def test_shared_tokens_are_distinct_and_exclude_the_own_token(num_tokens):
    shared = shared_tokens(KEYS[:num_tokens], 3)
    assert shared.shape == (num_tokens, min(3, max(num_tokens - 1, 0)))
    for token, others in enumerate(shared.tolist()):
        assert token not in others
        assert len(set(others)) == len(others)


def test_other_tokens_are_drawn_uniformly():
    token = other_tokens(KEYS[:5], 20_000, distinct=False)
    for own, others in enumerate(token):
        share = np.bincount(others, minlength=5) / len(others)
        assert share[own] == 0
        assert np.abs(np.delete(share, own) - 0.25).max() < 0.02


def test_other_tokens_of_a_single_token_are_itself():
    assert other_tokens(KEYS[:1], 3, distinct=False).tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 23])
def test_group_sampler_assigns_each_token_once_in_key_order(num_tokens):
    keys = KEYS[:num_tokens]
    targets = np.resize([1, 3, 4, 5], num_tokens)
    drawn = GroupSampler(COUNTS, 3).draw(keys, targets)
    groups = drawn.tensors["group_token"].numpy()
    assert groups.shape == (-(-num_tokens // 4), 4)
    dealt = groups.T.reshape(-1)
    assert dealt[:num_tokens].tolist() == np.argsort(keys).tolist()
    assert (dealt[num_tokens:] == -1).all()
    sizes = (groups >= 0).sum(1)
    assert sizes.max() - sizes.min() <= 1
    expected = log_q_bias(COUNTS.astype(np.float64))[targets - 1]
    assert np.array_equal(drawn.tensors["target_bias"].numpy(), expected)
    assert not drawn.keys
    assert "target_bias" not in GroupSampler(None, 3).draw(keys, targets).tensors
