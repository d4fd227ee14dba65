"""Attention of new tokens to a cached prefix."""

import pytest
import torch

from nestrec.ops.attention.cached_attention import BLOCK_ROWS, cached_attention, cached_attention_reference
from nestrec.ops.attention.hstu_attention import hstu_attention_reference
from nestrec.ops.attention.mask_and_bias import PLAIN, semi_local


def random_case(seed, prefix, history, candidates):
    heads, dim = 2, 4
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    new = [draw(heads, history + candidates, dim) for _ in range(3)]
    old = (draw(heads, prefix, dim), draw(heads, prefix, dim))
    history_bias, candidate_bias = draw(history, prefix + history), draw(prefix + history + 1)
    return new, old, history_bias, candidate_bias


SHAPES = [
    (0, 1, 0),
    (0, 5, 3),
    (4, 0, 3),
    (4, 1, 0),
    (7, 3, 2),
    (1, 300, 300),
    (300, BLOCK_ROWS, BLOCK_ROWS + 1),
    (3, 0, 1),
]


@pytest.mark.parametrize(("prefix", "history", "candidates"), SHAPES)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(
    "rules", [PLAIN, semi_local(1), semi_local(3, 2), semi_local(20, 5), semi_local(270, 40)], ids=str
)
def test_cached_attention_equals_reference(prefix, history, candidates, has_bias, rules):
    new, old, history_bias, candidate_bias = random_case(1, prefix, history, candidates)
    bias = torch.zeros(history + candidates, prefix + history + candidates, dtype=torch.float64)
    bias[:history, : prefix + history] = history_bias
    bias[history:, : prefix + history] = candidate_bias[:-1]
    bias.diagonal(prefix)[history:] = candidate_bias[-1]
    expected = cached_attention_reference(
        *new, old, num_candidates=candidates, normalizer=7.0, bias_NK=bias if has_bias else None, rules=rules
    )
    rows = (lambda first, end, keys: history_bias[first:end, keys]) if has_bias else None
    found = cached_attention(
        *new,
        old,
        num_candidates=candidates,
        normalizer=7.0,
        history_bias=rows,
        candidate_bias_K=candidate_bias if has_bias else None,
        rules=rules,
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_cached_attention_equals_full_causal_pass():
    new, old, _, _ = random_case(2, prefix=6, history=5, candidates=0)
    q = torch.cat([torch.randn(2, 6, 4, dtype=torch.float64), new[0]], dim=1)
    k, v = (torch.cat([a, b], dim=1) for a, b in zip(old, new[1:], strict=True))
    for rules in (PLAIN, semi_local(4, 2)):
        full = hstu_attention_reference(
            *(t.transpose(0, 1) for t in (q, k, v)), torch.tensor([0, 11]), normalizer=3.0, rules=rules
        ).transpose(0, 1)
        found = cached_attention(*new, old, num_candidates=0, normalizer=3.0, rules=rules)
        torch.testing.assert_close(found, full[:, 6:], rtol=1e-12, atol=1e-12)


def test_cached_attention_candidates_are_independent():
    new, old, history_bias, candidate_bias = random_case(3, prefix=4, history=2, candidates=3)
    arguments = {
        "num_candidates": 3,
        "normalizer": 2.0,
        "candidate_bias_K": candidate_bias,
        "history_bias": lambda first, end, keys: history_bias[first:end, keys],
    }
    before = cached_attention(*new, old, **arguments)
    for tensor in new:
        tensor[:, 3] += 1.0
    after = cached_attention(*new, old, **arguments)
    assert torch.equal(before[:, [0, 1, 2, 4]], after[:, [0, 1, 2, 4]])
    assert not torch.equal(before[:, 3], after[:, 3])
