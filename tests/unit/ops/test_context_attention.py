"""Context-parallel attention: partial results, summed as ranks sum them, equal attention over unsplit sequences."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.distributed.context_ring import ContextRing
from nestrec.jagged import offsets_of
from nestrec.ops.attention.bias_only import bias_attention_reference
from nestrec.ops.attention.hstu_attention import hstu_attention_reference
from nestrec.ops.attention.mask_and_bias import PLAIN, AttentionMask, RelativeBias, semi_local
from nestrec.ops.attention.softmax_attention import softmax_attention_reference
from nestrec.ops.context_parallel import token_partition
from nestrec.ops.context_parallel.ring_attention import (
    ChannelSums,
    SiluSum,
    hstu_attention_in_context,
    softmax_attention_in_context,
)
from nestrec.ops.context_parallel.ring_sum import ContextParallelGroup, ring_sum_reference
from nestrec.ops.context_parallel.token_partition import TokenPartition, count_causal_pairs

lengths_lists = st.lists(st.integers(0, 13), min_size=1, max_size=4)
biases = st.tuples(st.booleans(), st.sampled_from(["none", "table", "function"]))


@settings(max_examples=40)
@given(st.lists(st.integers(0, 40), max_size=6), st.integers(1, 6))
def test_context_parallel_partition_covers_tokens_once(lengths, size):
    parts = TokenPartition(np.array(lengths, np.int64), size)
    indices = np.concatenate([parts.global_indices(part) for part in range(size)])
    assert sorted(indices.tolist()) == list(range(sum(lengths)))
    first = np.cumsum(lengths) - lengths
    for part in range(size):
        offsets = parts.offsets(part)
        positions = parts.positions(part)
        assert offsets[-1] == parts.num_tokens(part) == len(positions)
        for b in range(len(lengths)):
            own = positions[offsets[b] : offsets[b + 1]]
            assert (np.diff(own) > 0).all()
            assert (parts.global_indices(part)[offsets[b] : offsets[b + 1]] == first[b] + own).all()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_context_parallel_parts_have_equal_cost(size):
    full = TokenPartition(np.array([16_384]), size)
    pairs = count_causal_pairs(full)
    assert max(pairs) == min(pairs)
    computed = [
        [sum(b.num_pairs for b in token_partition.blocks_of(full, r, p, PLAIN)) for p in range(size)]
        for r in range(size)
    ]
    # The cost is also equal at every step of the ring, so no rank waits for another.
    for step in range(size):
        assert len({computed[r][(r - step) % size] for r in range(size)}) == 1
    assert np.sum(computed) < 1.07 * sum(pairs)  # blocks on the diagonal compute masked pairs, too


def random_inputs(lengths, has_position, time):
    """Return random (q, k, v, bias)."""
    generator = torch.Generator().manual_seed(sum(lengths) + 7 * len(lengths))
    num = sum(lengths)
    longest = max(lengths)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    q, k, v = (draw(num, 2, 3).requires_grad_() for _ in range(3))
    bias = RelativeBias(
        position_table=draw(2 * longest + 1).requires_grad_() if has_position else None,
        time_table=draw(12).requires_grad_() if time == "table" else None,
        time_function=draw(3).requires_grad_() if time == "function" else None,
        time_T=draw(num) * 20,
        query_time_T=draw(num) * 20,
    )
    return q, k, v, bias


def run_in_parts(function, parts, inputs, grad):
    """Return the result and the gradients of (q, k, v, tables), joined from those of the parts."""
    q, k, v, bias = inputs
    indices = [torch.from_numpy(parts.global_indices(part)) for part in range(parts.size)]
    tables = {
        n: t.detach() for n in ("position_table", "time_table", "time_function") if (t := getattr(bias, n)) is not None
    }
    times = bias.has_time
    queries = [{"q": q.detach()[i]} | ({"query_time": bias.query_time_T[i]} if times else {}) for i in indices]
    keys = [{"k": k.detach()[i], "v": v.detach()[i]} | ({"time": bias.time_T[i]} if times else {}) for i in indices]
    sums, found = ring_sum_reference(function, parts, queries, keys, tables, [grad[i] for i in indices])
    order = torch.cat(indices).argsort()
    joined = [torch.cat(x)[order] for x in (sums, *([getattr(f, side)[n] for f in found] for side, n in _NAMES))]
    return joined + [sum(f.parameters[name] for f in found) for name in tables]


_NAMES = (("queries", "q"), ("keys", "k"), ("keys", "v"))


def expected(full, inputs, grad):
    return [full, *torch.autograd.grad(full, inputs, grad)]


def assert_same(found, expected_values):
    for actual, wanted in zip(found, expected_values, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-11)


mask_strategy = st.sampled_from([PLAIN, semi_local(1), semi_local(4), semi_local(3, 2), semi_local(2, 9)])


@settings(max_examples=30)
@given(lengths_lists, st.integers(1, 5), biases, mask_strategy, st.sampled_from([1 << 20, 24]))
def test_context_parallel_hstu_equals_full_sequences(lengths, size, kinds, rules, max_pairs):
    q, k, v, bias = random_inputs(lengths, *kinds)
    full = hstu_attention_reference(q, k, v, offsets_of(torch.tensor(lengths)), normalizer=7.0, bias=bias, rules=rules)
    grad = torch.randn_like(full)
    tables = [t for t in (bias.position_table, bias.time_table, bias.time_function) if t is not None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_partition, "MAX_PAIRS", max_pairs)
        patch.setattr(token_partition, "_MIN_ROWS", 2)
        patch.setattr(token_partition, "SMALL_PAIRS", 12)
        found = run_in_parts(SiluSum(7.0, rules), TokenPartition(np.array(lengths), size), (q, k, v, bias), grad)
    if sum(lengths):
        assert_same(found, expected(full, [q, k, v, *tables], grad))


@settings(max_examples=30)
@given(lengths_lists, st.integers(1, 4), st.sampled_from(["none", "table", "function"]), mask_strategy)
def test_context_parallel_fuxi_equals_full_sequences(lengths, size, time, rules):
    q, k, v, bias = random_inputs(lengths, True, time)
    offsets = offsets_of(torch.tensor(lengths))
    semantic = hstu_attention_reference(q, k, v, offsets, normalizer=7.0, rules=rules).flatten(1)
    full = torch.stack([semantic, *bias_attention_reference(v.flatten(1), offsets, bias, rules)], dim=1)
    grad = torch.randn_like(full)
    tables = [t for t in (bias.position_table, bias.time_table, bias.time_function) if t is not None]
    function = ChannelSums(7.0, rules, full.shape[1])
    if sum(lengths):
        found = run_in_parts(function, TokenPartition(np.array(lengths), size), (q, k, v, bias), grad)
        assert_same(found, expected(full, [q, k, v, *tables], grad))


def test_ring_attention_of_one_rank_saves_no_pairs():
    """Tensors saved for the backward pass grow with the tokens; full attention on a CPU saves their square."""
    q, k, v, bias = random_inputs([300, 40], True, "table")
    context = ContextParallelGroup(TokenPartition(np.array([300, 40]), 1), ContextRing(Topology.single()))
    saved: dict[int, int] = {}

    def save(x: torch.Tensor) -> torch.Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        found = hstu_attention_in_context(q, k, v, context, normalizer=7.0, bias=bias)
    expected_values = hstu_attention_reference(q, k, v, offsets_of(torch.tensor([300, 40])), normalizer=7.0, bias=bias)
    torch.testing.assert_close(found, expected_values, rtol=0, atol=1e-12)
    inputs = [q, k, v, bias.position_table, bias.time_table, bias.time_T, bias.query_time_T]
    assert sum(saved.values()) == sum(x.untyped_storage().nbytes() for x in inputs)


def test_context_parallel_softmax_of_large_scores_is_finite():
    q, k, v, _ = random_inputs([9, 4], False, "none")
    context = ContextParallelGroup(TokenPartition(np.array([9, 4]), 1), ContextRing(Topology.single()))
    found = softmax_attention_in_context(900 * q, k, v, context)
    expected_values = softmax_attention_reference(900 * q, k, v, offsets_of(torch.tensor([9, 4])))
    grad = torch.randn_like(found)
    torch.testing.assert_close(found, expected_values, rtol=0, atol=1e-11)
    for actual, wanted in zip(
        *(torch.autograd.grad(x, (q, k, v), grad) for x in (found, expected_values)), strict=True
    ):
        torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-9)


def test_context_parallel_rejects_unsupported_options():
    q, k, v, _ = random_inputs([9, 4], False, "none")
    context = ContextParallelGroup(TokenPartition(np.array([9, 4]), 1), ContextRing(Topology.single()))
    for rules in (AttentionMask(num_targets_B=torch.tensor([1, 1])), AttentionMask(num_context=1)):
        with pytest.raises(UserError, match="does not support candidates"):
            hstu_attention_in_context(q, k, v, context, normalizer=7.0, rules=rules)
    with pytest.raises(UserError, match="13 tokens"):
        hstu_attention_in_context(q[1:], k[1:], v[1:], context, normalizer=7.0)
    bias = RelativeBias(position_table=torch.zeros(16, dtype=torch.float64))
    with pytest.raises(UserError, match="position_table"):
        hstu_attention_in_context(q, k, v, context, normalizer=7.0, bias=bias)
    with pytest.raises(UserError, match="must be at least 1"):
        TokenPartition(np.array([3]), 0)
