"""Shapes and FLOPs of the attention benchmark."""

import numpy as np
import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.ops.attention.mask_and_bias import seen_mask
from nestrec_bench.harness.length_shapes import LENGTH_SHAPES, TOKENS, lengths_of, whole_shapes
from nestrec_bench.kernels.attention_bench import (
    IMPLEMENTATIONS,
    AttentionBench,
    batch_of,
    error_of,
    flops_of,
    measure_attention,
)
from nestrec_bench.step.step_bench import write_step_data


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


def test_lengths_are_those_of_a_file_or_of_ones_own_law(tmp_path):
    own = lengths_of("lognormal:mean=900,max=8192,count=200")
    assert (len(own), own.mean(), own.max() <= 8192) == (200, 900.0, True)
    assert lengths_of("u8192x3").tolist() == [8192] * 3
    assert lengths_of("u65536").tolist() == [65536] * 2
    file = tmp_path / "own-lengths.txt"
    file.write_text("3 9\n100,1")
    assert lengths_of(str(file)).tolist() == [3, 9, 100, 1]
    assert lengths_of(f"{file}:max=10").tolist() == [3, 9, 10, 1]


def test_lengths_of_a_dataset_are_whole_histories_of_its_users(tmp_path):
    write_step_data(tmp_path / "data", np.array([5, 9, 2]), num_batches=4, num_items=20, zipf=0.5)
    some, every = lengths_of(str(tmp_path / "data"), 40), lengths_of(str(tmp_path / "data"))
    assert sorted(every) == sorted([8, 12, 5] * 4)
    assert some.tolist() == every[: len(some)].tolist()
    assert 40 - 12 < some.sum() <= 40
    assert lengths_of(f"{tmp_path / 'data'}:max=7").max() == 7


@pytest.mark.parametrize(
    "text",
    ["lognormal:mean=900", "lognormal:mean=9,max=x,count=2", "lognormal:mean=9,max=9,count=0", "u0", "README.md"],
)
def test_lengths_that_mean_nothing_are_refused_by_name(text):
    with pytest.raises(UserError, match="lengths = "):
        lengths_of(text)


def test_shapes_that_were_cut_at_commas_are_whole_again():
    typed = "u1024,lognormal:mean=9,max=20,count=2,hstu-8x64-lognormal:mean=9,max=20,count=2,data/a:max=3,logn"
    shapes = [
        "u1024",
        "lognormal:mean=9,max=20,count=2",
        "hstu-8x64-lognormal:mean=9,max=20,count=2",
        "data/a:max=3",
        "logn",
    ]
    assert whole_shapes(typed.split(",")) == shapes


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_flops_count_every_seen_pair_twice_in_two_products(impl):
    lengths = [1500, 3]
    heads = 2
    dim = 5
    rules = IMPLEMENTATIONS[impl].rules
    pairs = sum(int(seen_mask(torch.tensor([0, n]), n, rules).sum()) for n in lengths)
    assert flops_of(lengths, heads, dim, impl) == 2 * 2 * pairs * heads * dim


@pytest.mark.parametrize("impl", [name for name in IMPLEMENTATIONS if name.startswith("nestrec")])
def test_errors_are_against_attention_with_the_same_biases_and_rules(impl, monkeypatch):
    monkeypatch.setattr("nestrec_bench.kernels.attention_bench.CHECKED_TOKENS", 1300)
    batch = batch_of([1301, 1400], "1x4", seed=0, device="cpu")
    assert 0.0 < error_of(IMPLEMENTATIONS[impl].prepare(batch), batch, impl) < 0.01


def test_without_a_gpu_the_benchmark_says_so(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="CUDA"):
        next(measure_attention(AttentionBench()))
