"""Padded attention equals its reference implementation for any sequence lengths."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestrec.base.errors import UserError
from nestrec.jagged import offsets_of
from nestrec.ops.attention.hstu_attention import (
    hstu_attention,
    hstu_attention_by_length,
    hstu_attention_padded,
    hstu_attention_reference,
)
from nestrec.ops.attention.mask_and_bias import (
    AttentionMask,
    RelativeBias,
    attention_mask,
    bucket_edges,
    position_bias,
    repeatable_sums,
    time_bias,
    time_bucket,
)
from nestrec.ops.attention.softmax_attention import softmax_attention, softmax_attention_reference

lengths_lists = st.lists(st.integers(0, 9), min_size=1, max_size=5)


def qkv(lengths, heads=2, dim=3):
    generator = torch.Generator().manual_seed(sum(lengths) + len(lengths))
    shape = (sum(lengths), heads, dim)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]


def assert_equal_values_and_gradients(fast, slow, inputs):
    assert torch.allclose(fast, slow, rtol=0, atol=1e-12)
    if fast.numel():
        weight = torch.randn_like(slow)
        gradients = (torch.autograd.grad(y, inputs, weight) for y in (fast, slow))
        for a, b in zip(*gradients, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-12)


@st.composite
def attention_rules(draw, lengths):
    targets = torch.tensor([draw(st.integers(0, n)) for n in lengths]) if draw(st.booleans()) else None
    longest = draw(st.one_of(st.none(), st.integers(1, 10)))
    return AttentionMask(
        num_targets_B=targets,
        num_context=draw(st.integers(0, 3)),
        max_attention_length=longest,
        looks_ahead=draw(st.booleans()),
    )


def random_bias(num_tokens, longest, has_position, time):
    generator = torch.Generator().manual_seed(num_tokens)
    draw = lambda n: torch.randn(n, generator=generator, dtype=torch.float64)  # noqa: E731
    return RelativeBias(
        position_table=draw(2 * longest + 1).requires_grad_() if has_position else None,
        time_table=draw(12).requires_grad_() if time == "table" else None,
        time_function=draw(3).requires_grad_() if time == "function" else None,
        time_T=draw(num_tokens) * 20,
        query_time_T=draw(num_tokens) * 20,
    )


@given(st.data(), lengths_lists, st.booleans(), st.sampled_from(["none", "table", "function"]))
def test_hstu_attention_equals_reference(data, lengths, has_position, time):
    offsets = offsets_of(torch.tensor(lengths))
    inputs = qkv(lengths)
    rules = data.draw(attention_rules(lengths))
    longest = max(lengths)
    bias = random_bias(sum(lengths), longest, has_position, time)
    fast = hstu_attention(*inputs, offsets, max_length=longest, normalizer=7.0, bias=bias, rules=rules)
    slow = hstu_attention_reference(*inputs, offsets, normalizer=7.0, bias=bias, rules=rules)
    tables = [t for t in (bias.position_table, bias.time_table, bias.time_function) if t is not None]
    assert_equal_values_and_gradients(fast, slow, [*inputs, *tables] if sum(lengths) else inputs)


@given(st.data(), st.integers(1, 9))
def test_attention_mask_equals_definition(data, length):
    rules = data.draw(attention_rules([length]))
    mask = attention_mask(torch.tensor([0, length]), length, rules)[0]
    history = length - (0 if rules.num_targets_B is None else int(rules.num_targets_B[0]))
    for i in range(length):
        for j in range(length):
            position = min(i, history)
            is_near = rules.max_attention_length is None or position - j < rules.max_attention_length
            is_context = j < rules.num_context
            if j >= history:
                expected = i == j
            elif i < rules.num_context and rules.looks_ahead:
                expected = True
            else:
                expected = i == j or (j < position and (is_near or is_context))
            assert mask[i, j] == expected


@pytest.mark.parametrize("time", ["table", "function"])
def test_attention_candidates_are_independent(time):
    """The output of a candidate, including its bias, does not depend on other candidates."""
    q, k, v = (x.detach() for x in qkv([9]))
    bias = random_bias(9, 9, has_position=True, time=time)
    alone = []
    for c in (6, 7, 8):
        rows = torch.tensor([0, 1, 2, 3, 4, 5, c])
        own = replace(bias, time_T=bias.time_T[rows], query_time_T=bias.query_time_T[rows])
        alone.append(
            hstu_attention(q[rows], k[rows], v[rows], torch.tensor([0, 7]), max_length=7, normalizer=5.0, bias=own)[6]
        )
    rules = AttentionMask(num_targets_B=torch.tensor([3]))
    together = hstu_attention(q, k, v, torch.tensor([0, 9]), max_length=9, normalizer=5.0, bias=bias, rules=rules)
    torch.testing.assert_close(together[6:], torch.stack(alone), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_THD": torch.zeros(4, 1, 2)}, "q, k, v"),
        ({"v_THD": torch.zeros(3, 1, 2, dtype=torch.float64)}, "q, k, v"),
        ({"offsets": torch.tensor([0.0, 3.0])}, "offsets"),
    ],
)
def test_attention_rejects_invalid_inputs(change, message):
    arguments = {name: torch.zeros(3, 1, 2) for name in ("q_THD", "k_THD", "v_THD")} | {"offsets": torch.tensor([0, 3])}
    with pytest.raises(UserError, match=message):
        hstu_attention(**(arguments | change), max_length=3, normalizer=1.0)
    with pytest.raises(UserError, match="max_attention_length"):
        AttentionMask(max_attention_length=0)
    with pytest.raises(UserError, match="time_table"):
        RelativeBias(time_table=torch.zeros(3))


def test_attention_length_groups_equal_padded_block():
    lengths = [700, 3, 0, 40]
    offsets = offsets_of(torch.tensor(lengths))
    inputs = qkv(lengths, heads=1)
    shared = {"max_length": 700, "normalizer": 700.0}
    assert_equal_values_and_gradients(
        hstu_attention(*inputs, offsets, **shared), hstu_attention_padded(*inputs, offsets, **shared), inputs
    )


@given(st.data(), lengths_lists, st.booleans(), st.sampled_from(["none", "table", "function"]), st.integers(1, 200))
def test_attention_by_length_equals_reference(data, lengths, has_position, time, pairs):
    """Holds for every maximum number of pairs per block, every order of lengths, candidates and windows."""
    offsets = offsets_of(torch.tensor(lengths))
    inputs = qkv(lengths)
    rules = data.draw(attention_rules(lengths))
    longest = max(lengths)
    bias = random_bias(sum(lengths), longest, has_position, time)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nestrec.ops.attention.hstu_attention.BLOCK_PAIRS", pairs)
        fast = hstu_attention_by_length(*inputs, offsets, normalizer=7.0, bias=bias, rules=rules)
    slow = hstu_attention_reference(*inputs, offsets, normalizer=7.0, bias=bias, rules=rules)
    tables = [t for t in (bias.position_table, bias.time_table, bias.time_function) if t is not None]
    assert_equal_values_and_gradients(fast, slow, [*inputs, *tables] if sum(lengths) else inputs)


def test_attention_does_not_pad_to_longest_sequence(monkeypatch):
    """On a CPU, each block has at most BLOCK_PAIRS pairs or one sequence, and every sequence is in one block."""
    lengths = [3, 90, 5, 4, 88, 1, 0, 2]
    blocks: list[tuple[int, int]] = []

    def recording_attention(q, k, v, offsets, **options):
        blocks.append((offsets.numel() - 1, options["max_length"]))
        return hstu_attention_padded(q, k, v, offsets, **options)

    monkeypatch.setattr("nestrec.ops.attention.hstu_attention.BLOCK_PAIRS", 100)
    monkeypatch.setattr("nestrec.ops.attention.hstu_attention.hstu_attention_padded", recording_attention)
    hstu_attention(*qkv(lengths), offsets_of(torch.tensor(lengths)), max_length=90, normalizer=1.0)
    assert blocks == [(5, 4), (1, 5), (1, 88), (1, 90)]


@given(lengths_lists)
def test_softmax_attention_equals_reference(lengths):
    offsets = offsets_of(torch.tensor(lengths))
    inputs = qkv(lengths)
    fast = softmax_attention(*inputs, offsets, max_length=max(lengths))
    assert_equal_values_and_gradients(fast, softmax_attention_reference(*inputs, offsets), inputs)


def test_attention_is_causal():
    offsets = torch.tensor([0, 6])
    q, k, v = (x.detach() for x in qkv([6]))
    before = hstu_attention(q, k, v, offsets, max_length=6, normalizer=6.0)
    k[5], v[5] = 100.0, 100.0
    after = hstu_attention(q, k, v, offsets, max_length=6, normalizer=6.0)
    assert torch.equal(before[:5], after[:5])
    assert not torch.equal(before[5], after[5])


def test_attention_time_buckets_follow_published_rule():
    delta = torch.tensor([0.0, 1.0, -1.0, 1.36, 86400.0, 1e30], dtype=torch.float64)
    assert time_bucket(delta, 128).tolist() == [0, 0, 0, 1, 37, 128]


def test_attention_bias_bucket_edges():
    edges = bucket_edges(128, torch.device("cpu"))
    number = torch.arange(1, 129)
    assert torch.equal(time_bucket(edges[1:-1], 128), number)
    assert torch.equal(time_bucket(edges[1:-1].nextafter(torch.zeros(1, dtype=torch.float64)), 128), number - 1)
    assert edges[0] == 0.0
    assert edges[-1] == torch.inf


@pytest.mark.parametrize("kind", ["position", "time"])
def test_attention_bias_gradients_equal_plain_indexing(kind):
    table = torch.randn(11 if kind == "position" else 129, dtype=torch.float64).requires_grad_()
    if kind == "position":
        fast = position_bias(table, 4)
        i = torch.arange(4)
        slow = table[i[None, :] - i[:, None] + 5]
    else:
        query_times, times = torch.rand(2, 4, dtype=torch.float64) * 1e6, torch.rand(2, 4, dtype=torch.float64) * 1e6
        fast = time_bias(table, query_times, times)
        slow = table[time_bucket(query_times[:, :, None] - times[:, None, :], 128)]
    assert torch.equal(fast, slow)
    weight = torch.randn_like(slow)
    (a,), (b,) = torch.autograd.grad(fast, table, weight), torch.autograd.grad(slow, table, weight)
    assert torch.allclose(a, b, atol=1e-12)


def test_attention_bias_gradient_sums_are_bitwise_identical():
    torch.manual_seed(0)
    index = torch.randint(0, 7, (5000,))
    weights = torch.randn(5000) * torch.logspace(-6, 4, 5000)
    found = repeatable_sums(index, weights, 9)
    largest = float(weights.abs().max())
    assert torch.allclose(found, torch.bincount(index, weights.double(), 9), rtol=0, atol=5000 * 2.0**-35 * largest)
    order = torch.randperm(5000)
    assert torch.equal(found, repeatable_sums(index[order], weights[order], 9))
    assert torch.equal(repeatable_sums(index, torch.zeros(5000), 9), torch.zeros(9, dtype=torch.float64))
    weights[3] = torch.nan
    assert not repeatable_sums(index, weights, 9).isfinite().any(), "NaN must not get lost"
