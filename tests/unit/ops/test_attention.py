"""Padded attention against its definition, for any lengths."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestrec.jagged import offsets_of
from nestrec.ops.hstu_attention import hstu_attention, hstu_attention_reference
from nestrec.ops.relative_bias import position_bias, time_bias, time_bucket
from nestrec.ops.softmax_attention import softmax_attention, softmax_attention_reference

lengths_lists = st.lists(st.integers(0, 9), min_size=1, max_size=5)


def qkv(lengths, heads=2, dim=3):
    generator = torch.Generator().manual_seed(sum(lengths) + len(lengths))
    shape = (sum(lengths), heads, dim)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]


def same_values_and_gradients(fast, slow, inputs):
    assert torch.allclose(fast, slow, rtol=0, atol=1e-12)
    if fast.numel():
        weight = torch.randn_like(slow)
        gradients = (torch.autograd.grad(y, inputs, weight) for y in (fast, slow))
        for a, b in zip(*gradients, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-12)


@given(lengths_lists, st.booleans())
def test_hstu_attention_equals_its_definition(lengths, with_bias):
    offsets, inputs = offsets_of(torch.tensor(lengths)), qkv(lengths)
    longest = max(lengths)
    bias = torch.randn(len(lengths), longest, longest, dtype=torch.float64).requires_grad_() if with_bias else None
    fast = hstu_attention(*inputs, offsets, max_length=longest, normaliser=7.0, bias_BNN=bias)
    slow = hstu_attention_reference(*inputs, offsets, normaliser=7.0, bias_BNN=bias)
    same_values_and_gradients(fast, slow, [*inputs, bias] if bias is not None and sum(lengths) else inputs)


def test_long_and_short_sequences_together_equal_the_padded_blocks(monkeypatch):
    lengths = [700, 3, 0, 40]
    offsets, inputs = offsets_of(torch.tensor(lengths)), qkv(lengths, heads=1)
    looped = hstu_attention(*inputs, offsets, max_length=700, normaliser=700.0)
    monkeypatch.setattr("nestrec.ops.hstu_attention.LARGE_PAIRS", 1 << 40)
    same_values_and_gradients(looped, hstu_attention(*inputs, offsets, max_length=700, normaliser=700.0), inputs)


@given(lengths_lists)
def test_softmax_attention_equals_its_definition(lengths):
    offsets, inputs = offsets_of(torch.tensor(lengths)), qkv(lengths)
    fast = softmax_attention(*inputs, offsets, max_length=max(lengths))
    same_values_and_gradients(fast, softmax_attention_reference(*inputs, offsets), inputs)


def test_a_later_token_changes_nothing_before_it():
    offsets = torch.tensor([0, 6])
    q, k, v = (x.detach() for x in qkv([6]))
    before = hstu_attention(q, k, v, offsets, max_length=6, normaliser=6.0)
    k[5], v[5] = 100.0, 100.0
    after = hstu_attention(q, k, v, offsets, max_length=6, normaliser=6.0)
    assert torch.equal(before[:5], after[:5])
    assert not torch.equal(before[5], after[5])


def test_time_buckets_follow_the_published_rule():
    delta = torch.tensor([0.0, 1.0, -1.0, 1.36, 86400.0, 1e30], dtype=torch.float64)
    assert time_bucket(delta, 128).tolist() == [0, 0, 0, 1, 37, 128]


@pytest.mark.parametrize("kind", ["position", "time"])
def test_bias_gradients_equal_those_of_plain_indexing(kind):
    table = torch.randn(11 if kind == "position" else 129, dtype=torch.float64).requires_grad_()
    if kind == "position":
        fast = position_bias(table, 4)
        i = torch.arange(4)
        slow = table[i[None, :] - i[:, None] + 5]
    else:
        asked, times = torch.rand(2, 4, dtype=torch.float64) * 1e6, torch.rand(2, 4, dtype=torch.float64) * 1e6
        fast = time_bias(table, asked, times)
        slow = table[time_bucket(asked[:, :, None] - times[:, None, :], 128)]
    assert torch.equal(fast, slow)
    weight = torch.randn_like(slow)
    (a,), (b,) = torch.autograd.grad(fast, table, weight), torch.autograd.grad(slow, table, weight)
    assert torch.allclose(a, b, atol=1e-12)
