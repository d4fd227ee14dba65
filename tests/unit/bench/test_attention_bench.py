"""Tests of the length shapes, FLOPs and errors of the attention benchmark."""

import numpy as np
import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.ops.attention.mask_and_bias import attention_mask
from nestrec_bench.harness.length_shapes import LENGTH_SHAPES, TOKENS, join_shapes, lengths_of
from nestrec_bench.kernels.attention_bench import (
    IMPLEMENTATIONS,
    AttentionBenchConfig,
    batch_of,
    error_of,
    flops_of,
    measure_attention,
)
from nestrec_bench.step.step_bench import write_step_data


@pytest.mark.parametrize("name", LENGTH_SHAPES)
def test_attention_bench_shapes_are_deterministic(name):
    lengths = lengths_of(name)
    assert lengths.sum() == TOKENS
    assert lengths.min() >= 1
    assert np.array_equal(lengths, lengths_of(name))


@pytest.mark.parametrize(
    ("name", "count", "longest"),
    [("u1024", 128, 1024), ("u4096", 32, 4096), ("logn", 224, 4096), ("shortvid", 480, 2048), ("kuai1k", 32, 14_704)],
)
def test_attention_bench_shape_matches_its_name(name, count, longest):
    lengths = lengths_of(name)
    assert (len(lengths), lengths.max()) == (count, longest)


def test_length_shapes_scale_with_number_of_tokens():
    assert len(lengths_of("u1024", 4 * TOKENS)) == 4 * len(lengths_of("u1024"))
    twice = lengths_of("logn", 2 * TOKENS)
    assert twice.sum() == 2 * TOKENS
    assert abs(np.median(twice) / np.median(lengths_of("logn")) - 1) < 0.05


def test_attention_bench_rejects_unknown_shape():
    with pytest.raises(UserError, match="Did you mean 'logn'"):
        lengths_of("longn")


def test_length_shapes_of_distribution_and_file(tmp_path):
    lognormal = lengths_of("lognormal:mean=900,max=8192,count=200")
    assert (len(lognormal), lognormal.mean(), lognormal.max() <= 8192) == (200, 900.0, True)
    assert lengths_of("u8192x3").tolist() == [8192] * 3
    assert lengths_of("u65536").tolist() == [65536] * 2
    file = tmp_path / "lengths.txt"
    file.write_text("3 9\n100,1")
    assert lengths_of(str(file)).tolist() == [3, 9, 100, 1]
    assert lengths_of(f"{file}:max=10").tolist() == [3, 9, 10, 1]


def test_length_shapes_of_dataset_are_user_histories(tmp_path):
    write_step_data(tmp_path / "data", np.array([5, 9, 2]), num_batches=4, num_items=20, zipf=0.5)
    limited = lengths_of(str(tmp_path / "data"), 40)
    all_lengths = lengths_of(str(tmp_path / "data"))
    assert sorted(all_lengths) == sorted([8, 12, 5] * 4)
    assert limited.tolist() == all_lengths[: len(limited)].tolist()
    assert 40 - 12 < limited.sum() <= 40
    assert lengths_of(f"{tmp_path / 'data'}:max=7").max() == 7


@pytest.mark.parametrize(
    "text",
    ["lognormal:mean=900", "lognormal:mean=9,max=x,count=2", "lognormal:mean=9,max=9,count=0", "u0", "README.md"],
)
def test_length_shapes_reject_invalid_parameters(text):
    with pytest.raises(UserError, match="lengths=") as error:
        lengths_of(text)
    assert error.value.value == text


def test_length_shapes_split_at_commas_are_joined():
    typed = "u1024,lognormal:mean=9,max=20,count=2,hstu-8x64-lognormal:mean=9,max=20,count=2,data/a:max=3,logn"
    shapes = [
        "u1024",
        "lognormal:mean=9,max=20,count=2",
        "hstu-8x64-lognormal:mean=9,max=20,count=2",
        "data/a:max=3",
        "logn",
    ]
    assert join_shapes(typed.split(",")) == shapes


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_attention_bench_flops_count_attended_pairs(impl):
    lengths = [1500, 3]
    heads = 2
    dim = 5
    rules = IMPLEMENTATIONS[impl].rules
    pairs = sum(int(attention_mask(torch.tensor([0, n]), n, rules).sum()) for n in lengths)
    assert flops_of(lengths, heads, dim, impl) == 2 * 2 * pairs * heads * dim


@pytest.mark.parametrize("impl", [name for name in IMPLEMENTATIONS if name.startswith("nestrec")])
def test_attention_bench_errors_use_same_bias_and_mask(impl, monkeypatch):
    monkeypatch.setattr("nestrec_bench.kernels.attention_bench.CHECKED_TOKENS", 1300)
    batch = batch_of([1301, 1400], "1x4", seed=0, device="cpu")
    assert 0.0 < error_of(IMPLEMENTATIONS[impl].prepare(batch), batch, impl) < 0.01


def test_attention_bench_rejects_missing_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="CUDA"):
        next(measure_attention(AttentionBenchConfig()))
