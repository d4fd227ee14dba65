"""Grouped losses equal losses over candidates, computed for one token at a time."""

import numpy as np
import pytest
import torch

from nestrec.data.flat_arrays import sample_keys
from nestrec.data.samples.negative_sampling import GroupSampler
from nestrec.ops.losses.item_losses import make_candidates, plain_sampled_loss
from nestrec.ops.losses.sampled_losses import grouped_loss

KEYS = sample_keys(3, 1, np.arange(400))


@pytest.mark.parametrize(("num_tokens", "num_negatives"), [(1, 3), (12, 3), (13, 3), (50, 49), (50, 60), (31, 1)])
def test_grouped_loss_groups_are_even_and_complete(num_tokens, num_negatives):
    token_GS = (
        GroupSampler(None, num_negatives).draw(KEYS[:num_tokens], np.ones(num_tokens, np.int64)).tensors["group_token"]
    )
    assert sorted(token_GS[token_GS >= 0].tolist()) == list(range(num_tokens))
    sizes = (token_GS >= 0).sum(1)
    assert sizes.max() - sizes.min() <= 1
    assert ((token_GS >= 0).int().diff(dim=1) <= 0).all()


def test_grouped_loss_groups_are_random_and_deterministic():
    draw = GroupSampler(None, 9).draw
    first, again = (draw(KEYS, np.ones(400, np.int64)).tensors["group_token"] for _ in range(2))
    assert torch.equal(first, again)
    other = draw(sample_keys(3, 2, np.arange(400)), np.ones(400, np.int64)).tensors["group_token"]
    assert not torch.equal(first, other)


@pytest.mark.parametrize("kind", ["sampled_softmax", "bce"])
@pytest.mark.parametrize("log_q", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_negatives"), [(24, 5), (23, 5), (7, 6), (1, 0)])
def test_grouped_loss_and_gradients_equal_candidate_loss(kind, log_q, num_tokens, num_negatives):
    torch.manual_seed(num_tokens)
    target = np.random.default_rng(0).integers(1, 9, num_tokens)
    batch = GroupSampler(np.arange(1, 9) if log_q else None, num_negatives).draw(KEYS[:num_tokens], target).tensors
    query, row = (torch.randn(n, 6, dtype=torch.float64, requires_grad=True) for n in (num_tokens, 9))
    positive = torch.from_numpy(target.astype(np.int32))
    token_GS = batch["group_token"]
    bias = batch.get("target_bias")
    found = grouped_loss(query, row, positive, token_GS, kind, bias_T=bias)
    expected = sum(_reference_loss(query, row, positive, group[group >= 0], bias, kind) for group in token_GS)
    torch.testing.assert_close(found.sum(), expected)
    for a, b in zip(*(torch.autograd.grad(loss, (query, row)) for loss in (found.sum(), expected)), strict=True):
        torch.testing.assert_close(a, b)


def _reference_loss(query, row, positive, group, bias, kind):  # noqa: PLR0917
    """Return the loss of a group by definition: the negatives of a token are the targets of the other tokens."""
    group = group.long()
    total = query.sum() * 0.0
    for index, token in enumerate(group):
        others = torch.cat([group[:index], group[index + 1 :]])
        candidates = make_candidates(
            positive[token][None], positive[others][None], bias_TR=None if bias is None else bias[others][None]
        )
        total = total + plain_sampled_loss(query[token][None], row, candidates, kind).sum()
    return total
