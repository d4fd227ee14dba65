"""Dropout masks depend on the token, not on the batch."""

import numpy as np
import torch

from nestrec.base.random import as_int64
from nestrec.data.flat_arrays import sample_keys
from nestrec.ops.layers.fused_layers import dropout, keep_mask

KEYS = as_int64(sample_keys(1, 1, np.arange(5000)))


def test_dropout_rate_and_mean_are_correct():
    mask = keep_mask(KEYS, 0, 16, 0.3)
    assert abs(mask.double().mean() - 0.7) < 0.005
    x = torch.ones(5000, 16)
    assert abs(dropout(x, KEYS, 0, 0.3).mean() - 1.0) < 0.01


def test_dropout_masks_follow_token_keys():
    order = torch.randperm(5000)
    assert torch.equal(keep_mask(KEYS[order], 2, 8, 0.5), keep_mask(KEYS, 2, 8, 0.5)[order])


def test_dropout_sites_tokens_and_channels_are_independent():
    a, b = keep_mask(KEYS, 0, 8, 0.5).double(), keep_mask(KEYS, 1, 8, 0.5).double()
    for x, y in [(a, b), (a[:, :4], a[:, 4:]), (a[:2500], a[2500:])]:
        agreement = (x == y).double().mean()
        assert abs(agreement - 0.5) < 0.02


def test_dropout_probability_zero_is_identity():
    x = torch.randn(5000, 4)
    assert dropout(x, KEYS, 0, 0.0) is x
