"""Losses by groups are those of candidates, one token at a time."""

import numpy as np
import pytest
import torch

from nestrec.data.flat_arrays import sample_keys
from nestrec.data.samples.negative_sampling import GroupSampler
from nestrec.ops.losses.item_losses import make_candidates, plain_sampled_loss
from nestrec.ops.losses.sampled_losses import grouped_loss

KEYS = sample_keys(3, 1, np.arange(400))


@pytest.mark.parametrize(("num_tokens", "num_negatives"), [(1, 3), (12, 3), (13, 3), (50, 49), (50, 60), (31, 1)])
def test_every_token_is_in_one_group_and_groups_are_even(num_tokens, num_negatives):
    token_GS = (
        GroupSampler(None, num_negatives).draw(KEYS[:num_tokens], np.ones(num_tokens, np.int64)).tensors["group_token"]
    )
    assert sorted(token_GS[token_GS >= 0].tolist()) == list(range(num_tokens))
    sizes = (token_GS >= 0).sum(1)
    assert sizes.max() - sizes.min() <= 1
    assert ((token_GS >= 0).int().diff(dim=1) <= 0).all()


def test_groups_are_random_and_repeatable():
    draw = GroupSampler(None, 9).draw
    first, again = (draw(KEYS, np.ones(400, np.int64)).tensors["group_token"] for _ in range(2))
    assert torch.equal(first, again)
    other = draw(sample_keys(3, 2, np.arange(400)), np.ones(400, np.int64)).tensors["group_token"]
    assert not torch.equal(first, other)


@pytest.mark.parametrize("kind", ["sampled_softmax", "bce"])
@pytest.mark.parametrize("log_q", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_negatives"), [(24, 5), (23, 5), (7, 6), (1, 0)])
def test_losses_and_gradients_are_those_of_candidates(kind, log_q, num_tokens, num_negatives):
    torch.manual_seed(num_tokens)
    target = np.random.default_rng(0).integers(1, 9, num_tokens)
    drawn = GroupSampler(np.arange(1, 9) if log_q else None, num_negatives).draw(KEYS[:num_tokens], target).tensors
    query, row = (torch.randn(n, 6, dtype=torch.float64, requires_grad=True) for n in (num_tokens, 9))
    positive = torch.from_numpy(target.astype(np.int32))
    token_GS = drawn["group_token"]
    bias = drawn.get("target_bias")
    found = grouped_loss(query, row, positive, token_GS, kind, bias_T=bias)
    expected = sum(_by_candidates(query, row, positive, group[group >= 0], bias, kind) for group in token_GS)
    torch.testing.assert_close(found.sum(), expected)
    for a, b in zip(*(torch.autograd.grad(loss, (query, row)) for loss in (found.sum(), expected)), strict=True):
        torch.testing.assert_close(a, b)


def _by_candidates(query, row, positive, group, bias, kind):  # noqa: PLR0917
    """The definition: each token of a group among the targets of the others."""
    group = group.long()
    total = query.sum() * 0.0
    for place, token in enumerate(group):
        others = torch.cat([group[:place], group[place + 1 :]])
        candidates = make_candidates(
            positive[token][None], positive[others][None], bias_TR=None if bias is None else bias[others][None]
        )
        total = total + plain_sampled_loss(query[token][None], row, candidates, kind).sum()
    return total
