"""Every variant of the sampled losses equals the plain one: many shapes, false negatives, sharing, log-Q."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from nestrec.ops.kernel_op import IS_INTERPRETED
from nestrec.ops.losses.item_losses import LossCandidates, full_cross_entropy, make_candidates
from nestrec.ops.losses.sampled_losses import sampled_loss, sum_outer, sum_outer_reference

SHAPES = [(0, 3, 5, 4), (1, 1, 1, 1), (1, 4, 3, 7), (6, 5, 9, 4), (33, 17, 700, 12), (40, 3, 2000, 33), (7, 0, 5, 3)]
"""Tokens, negatives, rows, channels; few and many rows for the two implementations of `plain`."""


def random_inputs(shape, *, shared=0, bias=False, seed=0, dtype=torch.float64):
    num_tokens, num_negatives, num_rows, dim = shape
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(num_tokens, dim, generator=generator, dtype=dtype).requires_grad_()
    rows = torch.randn(num_rows, dim, generator=generator, dtype=dtype).requires_grad_()
    positive = torch.randint(num_rows, (num_tokens,), generator=generator, dtype=torch.int32)
    negative = torch.randint(num_rows, (num_tokens, num_negatives), generator=generator, dtype=torch.int32)
    others = torch.randint(max(num_tokens, 1), (num_tokens, shared), generator=generator, dtype=torch.int32)
    biases = torch.randn(num_tokens, num_negatives, generator=generator, dtype=dtype) if bias else None
    candidates = make_candidates(positive, negative, bias_TR=biases, shared_TK=others if shared else None)
    return query, rows, candidates


def loss_and_gradients(query, rows, candidates, kind, **options):
    leaves = query.detach().clone().requires_grad_(), rows.detach().clone().requires_grad_()
    loss = sampled_loss(*leaves, candidates, kind, **options)
    weight = torch.linspace(0.5, 1.5, len(loss), dtype=loss.dtype)
    (loss * weight).sum().backward()
    return [loss.detach(), *(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("kind", ["sampled_softmax", "bce"])
@pytest.mark.parametrize("variant", ["segments", "fused", "offload"])
@pytest.mark.parametrize("shape", SHAPES)
def test_sampled_loss_variants_equal_plain(shape, variant, kind):
    for shared, bias in ((0, False), (2, True)):
        inputs = random_inputs(shape, shared=shared, bias=bias)
        plain = loss_and_gradients(*inputs, kind)
        for segment_tokens in (1, 5, 10_000):
            other = loss_and_gradients(*inputs, kind, variant=variant, segment_tokens=segment_tokens)
            for a, b in zip(plain, other, strict=True):
                assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def test_make_candidates_adds_shared_negatives():
    positive, negative = torch.tensor([0, 1, 2]), torch.tensor([[3, 4], [5, 6], [7, 8]])
    found = make_candidates(positive, negative, shared_TK=torch.tensor([[2], [0], [1]]))
    assert found.index_TN.tolist() == [[0, 3, 4, 7, 8], [1, 5, 6, 3, 4], [2, 7, 8, 5, 6]]


def test_sampled_loss_ignores_negative_equal_to_positive():
    query, rows, _ = random_inputs((2, 0, 9, 4))
    candidates = LossCandidates(torch.tensor([[3, 3, 5], [4, 1, 4]]))
    loss = sampled_loss(query, rows, candidates, "sampled_softmax")
    for token, (positive, negative) in enumerate([(3, 5), (4, 1)]):
        logits = torch.stack([query[token] @ rows[positive], query[token] @ rows[negative]])
        assert torch.allclose(loss[token], cross_entropy(logits[None], torch.tensor([0])), atol=1e-12)


def test_full_cross_entropy_equals_sampled_softmax_over_all():
    query, rows, candidates = random_inputs((6, 0, 9, 4))
    everything = make_candidates(candidates.index_TN[:, 0], torch.arange(9, dtype=torch.int32).expand(6, 9))
    sampled = sampled_loss(query, rows, everything, "sampled_softmax")
    assert torch.allclose(full_cross_entropy(query, rows, candidates.index_TN[:, 0].long()), sampled, atol=1e-12)


def test_sampled_loss_bce_of_certain_predictions_is_zero():
    rows = torch.tensor([[50.0], [-50.0]])
    candidates = LossCandidates(torch.tensor([[0, 1, 1]]))
    assert sampled_loss(torch.ones(1, 1), rows, candidates, "bce").item() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (40, 7)])
def test_sum_outer_is_bitwise_identical_to_reference(shape, dtype):
    torch.manual_seed(0)
    slope, query = torch.randn(shape, dtype=dtype), torch.randn(shape[0], 5, dtype=dtype)
    index = torch.randint(0, 13, shape, dtype=torch.int32)
    assert torch.equal(sum_outer(slope, query, index, 13), sum_outer_reference(slope, query, index, 13))


def test_sampled_loss_gradients_do_not_depend_on_threads():
    index = torch.randint(0, 100, (3000, 20), dtype=torch.int32)
    slope, query = torch.randn(3000, 20), torch.randn(3000, 8)
    before = torch.get_num_threads()
    sums = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        sums.append(sum_outer(slope, query, index, 100).numpy())
    torch.set_num_threads(before)
    assert np.array_equal(*sums)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sum_outer_of_popular_rows_uses_runs(dtype):
    """Row 2 is a candidate of almost every token, row 4 of exactly one run of tokens; on a CPU bitwise identical."""
    torch.manual_seed(1)
    slope, query = torch.randn(300, 3, dtype=dtype), torch.randn(300, 5, dtype=dtype)
    index = torch.randint(0, 6, (300, 3), dtype=torch.int32)
    index[:290, 1:] = 2
    index[:256, 0] = 4
    index[256:, 0][index[256:, 0] == 4] = 3
    found = sum_outer(slope, query, index, 7)
    expected = sum_outer_reference(slope, query, index, 7)
    if IS_INTERPRETED:
        torch.testing.assert_close(found, expected)
    else:
        assert torch.equal(found, expected)
