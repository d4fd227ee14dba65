"""Losses against their textbook forms."""

import torch
from torch.nn.functional import cross_entropy

from nestrec.ops.softmax_losses import bce, full_cross_entropy, sampled_logits, sampled_softmax

T, R, U, D = 6, 5, 9, 4


def drawn():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(T, D, generator=generator, dtype=torch.float64).requires_grad_()
    rows = torch.randn(U, D, generator=generator, dtype=torch.float64).requires_grad_()
    positive = torch.randint(U, (T,), generator=generator)
    negative = torch.randint(U, (T, R), generator=generator)
    negative[0, 0] = positive[0]
    return query, rows, positive, negative


def test_both_ways_to_negative_logits_agree():
    query, rows, positive, negative = drawn()
    padded_rows = torch.cat([rows, rows.new_zeros(R * 64, D)])
    few = sampled_logits(query, rows, positive, negative)
    many = sampled_logits(query, padded_rows, positive, negative)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(few, many, strict=True))


def test_a_negative_that_is_the_positive_does_not_count():
    query, rows, positive, negative = drawn()
    loss = sampled_softmax(*sampled_logits(query, rows, positive, negative))
    logits = torch.stack([query[0] @ rows[i] for i in [int(positive[0]), *negative[0, 1:].tolist()]])
    assert torch.allclose(loss[0], cross_entropy(logits[None], torch.tensor([0])), atol=1e-12)


def test_full_cross_entropy_is_sampled_softmax_over_everything():
    query, rows, positive, _ = drawn()
    everything = torch.arange(U).expand(T, U)
    sampled = sampled_softmax(*sampled_logits(query, rows, positive, everything))
    assert torch.allclose(full_cross_entropy(query, rows, positive), sampled, atol=1e-12)


def test_bce_of_certain_answers_is_zero():
    assert bce(torch.tensor([50.0]), torch.tensor([[-50.0, -50.0]])).item() < 1e-12
