"""Shapes and FLOPs of the attention benchmark."""

import numpy as np
import pytest

from nestrec.base.errors import UserError
from nestrec.bench.kernels.attention import AttentionBench, flops_of, measure_attention
from nestrec.data.synthetic.length_shapes import LENGTH_SHAPES, TOKENS, lengths_of


@pytest.mark.parametrize("name", LENGTH_SHAPES)
def test_a_shape_has_its_tokens_and_is_always_the_same(name):
    lengths = lengths_of(name)
    assert lengths.sum() == TOKENS
    assert lengths.min() >= 1
    assert np.array_equal(lengths, lengths_of(name))


@pytest.mark.parametrize(
    ("name", "count", "longest"),
    [("u1024", 128, 1024), ("u4096", 32, 4096), ("logn", 224, 4096), ("shortvid", 480, 2048), ("kuai1k", 32, 14_704)],
)
def test_a_shape_is_what_its_name_stands_for(name, count, longest):
    lengths = lengths_of(name)
    assert (len(lengths), lengths.max()) == (count, longest)


def test_more_tokens_are_more_sequences_of_the_same_kind():
    assert len(lengths_of("u1024", 4 * TOKENS)) == 4 * len(lengths_of("u1024"))
    twice = lengths_of("logn", 2 * TOKENS)
    assert twice.sum() == 2 * TOKENS
    assert abs(np.median(twice) / np.median(lengths_of("logn")) - 1) < 0.05


def test_an_unknown_shape_is_named_with_a_remedy():
    with pytest.raises(UserError, match="did you mean 'logn'"):
        lengths_of("longn")


def test_flops_count_every_seen_pair_twice_in_two_products():
    lengths, heads, dim = [3, 1], 2, 5
    pairs = sum(i + 1 for n in lengths for i in range(n))
    assert flops_of(lengths, heads, dim) == 2 * 2 * pairs * heads * dim


def test_without_a_gpu_the_benchmark_says_so(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="CUDA"):
        measure_attention(AttentionBench())
