"""The plain attention kernel in the Triton interpreter: every option, forward and backward, without a GPU."""

import numpy as np
import pytest
import torch

from nestrec.jagged import offsets_of
from nestrec.ops.attention.hstu_attention import hstu_attention, hstu_attention_reference
from nestrec.ops.attention.mask_and_bias import (
    AttentionMask,
    RelativeBias,
    attention_mask,
    bucket_edges,
    position_bias,
    time_bucket,
)
from nestrec.ops.kernel_op import HAS_TRITON, IS_INTERPRETED

if HAS_TRITON and IS_INTERPRETED:
    import triton
    import triton.language as tl

    from nestrec.ops.attention.time_triton import time_bucket as kernel_bucket

    @triton.jit
    def _bucket_kernel(x, y, edges, count, SIZE: tl.constexpr):
        i = tl.arange(0, SIZE)
        tl.store(y + i, kernel_bucket(tl.load(x + i), edges, count))


pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.skipif(not (HAS_TRITON and IS_INTERPRETED), reason="needs Triton and TRITON_INTERPRET=1"),
]
NORMALIZER = 20.0


def random_case(seed):
    """Return random lengths, vectors, bias and rules; every option is drawn independently."""
    draw = np.random.default_rng(seed)
    lengths = draw.choice([0, 1, 2, 7, 17, 31, 32, 33, 40], draw.integers(1, 4)).tolist()
    lengths = lengths if sum(lengths) else [5]
    shape = (sum(lengths), 1, int(draw.choice([8, 20])))
    vectors = [torch.from_numpy(draw.normal(0, 0.7, shape)) for _ in range(4)]
    targets = [int(draw.integers(0, n + 1)) for n in lengths]
    rules = AttentionMask(
        num_targets_B=torch.tensor(targets) if draw.random() < 0.5 else None,
        num_context=int(draw.integers(1, 35)) if draw.random() < 0.4 else 0,
        max_attention_length=int(draw.integers(1, 40)) if draw.random() < 0.4 else None,
        looks_ahead=bool(seed % 4),
    )
    times = torch.from_numpy(np.cumsum(draw.integers(0, 10**4, shape[0])).astype(np.float64))
    bias = RelativeBias(
        position_table=torch.from_numpy(draw.normal(0, 0.5, 2 * max(lengths) + 1)) if draw.random() < 0.5 else None,
        time_table=torch.from_numpy(draw.normal(0, 0.5, 40)) if draw.random() < 0.5 else None,
        time_T=times,
        query_time_T=times + 3,
    )
    return lengths, vectors, bias, rules


def results(attend, vectors, bias, dtype, table_dtype):
    inputs = [x.to(dtype).requires_grad_() for x in vectors[:3]]
    tables = [None if t is None else t.to(table_dtype).requires_grad_() for t in (bias.position_table, bias.time_table)]
    own = RelativeBias(
        position_table=tables[0], time_table=tables[1], time_T=bias.time_T, query_time_T=bias.query_time_T
    )
    out = attend(*inputs, own)
    return [out, *torch.autograd.grad(out, inputs + [t for t in tables if t is not None], vectors[3].to(dtype))]


@pytest.mark.parametrize("seed", [*range(14), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(14, 36))])
def test_attention_kernel_equals_reference(seed):
    lengths, vectors, bias, rules = random_case(seed)
    offsets = offsets_of(torch.tensor(lengths))
    dtype, tolerance = (torch.float32, 2e-6) if seed % 3 else (torch.float16, 3e-3)
    found = results(
        lambda q, k, v, b: hstu_attention(
            q, k, v, offsets, max_length=max(lengths), normalizer=NORMALIZER, bias=b, rules=rules
        ),
        vectors,
        bias,
        dtype,
        torch.float32,
    )
    exact = results(
        lambda q, k, v, b: hstu_attention_reference(q, k, v, offsets, normalizer=NORMALIZER, bias=b, rules=rules),
        vectors,
        bias,
        torch.float64,
        torch.float64,
    )
    for a, b in zip(found, exact, strict=True):
        assert float((a.double() - b).detach().norm()) <= tolerance * max(float(b.detach().norm()), 1e-3)


def test_attention_kernel_time_buckets_equal_float64():
    """Includes times within rounding error of every bucket edge."""
    edges = torch.exp(0.301 * torch.arange(1, 65, dtype=torch.float64))
    delta = torch.cat([edges * (1 + e) for e in (0.0, 1e-15, -1e-15, 3e-9, -3e-9, 1e-7, -1e-7, 0.99)])
    delta[100:200] *= -1.0
    delta[:3] = torch.tensor([0.0, 1.0, -1e30])
    found = torch.empty(len(delta), dtype=torch.int32)
    _bucket_kernel[(1,)](delta, found, bucket_edges(50, delta.device), 50, SIZE=len(delta))
    assert torch.equal(found.long(), time_bucket(delta, 50))


def random_times(seed, lengths):
    """Return the offsets, query times and event times of random sequences."""
    draw = np.random.default_rng(seed)
    times = torch.from_numpy(np.cumsum(draw.integers(0, 10**5, sum(lengths))) / 7)
    return offsets_of(torch.tensor(lengths)), times + 11.0, times


def iterate_tiles(lengths, plan, *, is_square):
    """Yield (index of the sequence, its length, block of queries, block of keys, index of the tile)."""
    for number, (first, length) in enumerate(zip(plan.first_B.tolist(), lengths, strict=True)):
        blocks = -(-length // 64)
        for a in range(blocks):
            for b in range(blocks if is_square else a + 1):
                yield number, length, a, b, first + (a * blocks if is_square else a * (a + 1) // 2) + b


@pytest.mark.parametrize("kind", ["buckets", "function"])
@pytest.mark.parametrize("is_square", [False, True])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_attention_bias_tiles_contain_half_of_each_bias(is_reversed, is_square, kind):
    """Words have the order in which a warp group owns the elements of a product; the error is bfloat16 rounding."""
    from nestrec.ops.attention.pair_tiles import pair_buckets, plan_tiles, write_bias

    lengths = [70, 0, 129, 64]
    offsets, query_times, times = random_times(5, lengths)
    draw = np.random.default_rng(6)
    table = lambda size: torch.from_numpy(draw.normal(0, 0.5, size)).float()  # noqa: E731
    bias = RelativeBias(
        position_table=table(2 * 129 + 1),
        time_table=table(60) if kind == "buckets" else None,
        time_function=torch.tensor([0.7, 10.0, -0.7]) if kind == "function" else None,
        time_T=times,
        query_time_T=query_times,
    )
    targets = torch.tensor([3, 0, 70, 1])
    rules = AttentionMask(num_targets_B=targets, num_context=4 if is_square else 0)
    plan, _ = plan_tiles(offsets, sum(lengths), 129, is_square=is_square)
    buckets = pair_buckets(times, query_times, offsets, plan, 59) if kind == "buckets" else None
    found = write_bias(
        bias,
        buckets,
        offsets,
        sum(lengths),
        129,
        plan,
        targets,
        is_square=is_square,
        is_reversed=is_reversed,
        dtype=torch.bfloat16,
    )
    exact_BNN = bias.dense(offsets, 129, rules)
    n = torch.arange(2048)
    thread = n // 4 % 128
    u = n // 512
    k = n // 2 % 2
    h = n % 2
    row = thread // 32 * 16 + h * 8 + thread // 4 % 8
    column = 16 * u + 8 * k + 2 * (thread % 4)
    for number, length, a, b, tile in iterate_tiles(lengths, plan, is_square=is_square):
        words = found.words[tile]
        for value, c in ((words << 16).view(torch.float32), column), (words.view(torch.float32), column + 1):
            i, j = (a * 64 + c, b * 64 + row) if is_reversed else (a * 64 + row, b * 64 + c)
            assert value.isfinite().all()
            is_inside = (i < length) & (j < length)
            expected = exact_BNN[number, i[is_inside], j[is_inside]]
            assert ((2.0 * value[is_inside] - expected).abs() <= 2.0**-8 * expected.abs() * 1.01 + 1e-6).all()


@pytest.mark.parametrize("is_reversed", [False, True])
def test_attention_position_bias_words_contain_half_of_each_bias(is_reversed):
    """The words of a thread are found for every first row and column of a tile."""
    from nestrec.ops.attention.pair_tiles import write_bias

    table = torch.from_numpy(np.random.default_rng(6).normal(0, 0.5, 2 * 200 + 1)).float()
    found = write_bias(
        RelativeBias(position_table=table), None, torch.tensor([0, 200]), 200, 200, None, None,
        is_square=True, is_reversed=is_reversed, dtype=torch.bfloat16,
    )  # fmt: skip
    row, column = torch.arange(200)[:, None], torch.arange(0, 200, 2)[None, :]
    words = found.words[found.origin + row // 8 - column // 8, row % 8 * 4 + column % 8 // 2]
    exact = position_bias(table, 200)
    exact = exact.T if is_reversed else exact
    for value, expected in ((words << 16), exact[:, ::2]), (words, exact[:, 1::2]):
        assert ((2.0 * value.view(torch.float32) - expected).abs() <= 2.0**-8 * expected.abs() * 1.01 + 1e-6).all()


@pytest.mark.parametrize("option", ["buckets", "function", "window", "looks ahead"])
def test_attention_bias_gradient_sums_equal_reference(option):
    from nestrec.ops.attention.attention_inputs import AttentionInputs
    from nestrec.ops.attention.bias_gradients import TableSums
    from nestrec.ops.attention.pair_tiles import pair_buckets, plan_tiles

    lengths = [70, 0, 20]
    offsets, query_times, times = random_times(7, lengths)
    draw = np.random.default_rng(8)
    is_square = option == "looks ahead"
    rules = AttentionMask(
        num_context=9 if option in ("window", "looks ahead") else 0,
        looks_ahead=is_square,
        max_attention_length=40 if option == "window" else None,
    )
    learned = [torch.zeros(141), torch.zeros(60), torch.tensor([0.7, 10.0, -0.7])]
    learned[1 if option == "function" else 2] = None
    plan, _ = plan_tiles(offsets, sum(lengths), 70, is_square=is_square)
    pair_gradients = torch.full((plan.max_tiles, 2, 64, 64), float("nan"))
    grad_BNN = torch.from_numpy(draw.normal(0, 1.0, (3, 70, 70))) * attention_mask(offsets, 70, rules)
    for number, length, a, b, tile in iterate_tiles(lengths, plan, is_square=is_square):
        padded = torch.zeros(256, 256, dtype=torch.float64)
        padded[:length, :length] = grad_BNN[number, :length, :length]
        part = padded[64 * a : 64 * a + 64, 64 * b : 64 * b + 64].T.float()
        pair_gradients[tile] = torch.stack([0.25 * part, 0.75 * part])
    bias = lambda values, dtype: RelativeBias(  # noqa: E731
        **{
            name: None if x is None else x.detach().to(dtype).requires_grad_()
            for name, x in zip(("position_table", "time_table", "time_function"), values, strict=True)
        },
        time_T=times,
        query_time_T=query_times,
    )
    own = bias(learned, torch.float32)
    buckets = None if own.time_table is None else pair_buckets(times, query_times, offsets, plan, 59)
    sums = TableSums(AttentionInputs(offsets, 70, NORMALIZER, own, rules), sum(lengths), plan, buckets)
    sums.add(pair_gradients[:, :1].contiguous())
    sums.add(pair_gradients[:, 1:].contiguous())
    exact = bias(learned, torch.float64)
    inside = (torch.arange(70)[None] < torch.tensor(lengths)[:, None]).double()
    (exact.dense(offsets, 70, rules) * grad_BNN * inside[:, :, None] * inside[:, None] / NORMALIZER).sum().backward()
    expected = [x for x in (exact.position_table, exact.time_table, exact.time_function) if x is not None]
    found = [x for x in sums.gradients() if x is not None]
    for a, b in zip(found, expected, strict=True):
        assert float((a.double() - b.grad).norm()) <= 1e-5 * float(b.grad.norm())


def test_attention_strided_inputs_equal_contiguous_copies():
    lengths, vectors, _, rules = random_case(2)
    offsets = offsets_of(torch.tensor(lengths))
    strided = [torch.stack([x, x], dim=-1).flatten(2).float()[:, :, ::2] for x in vectors]
    assert not strided[0].is_contiguous()
    call = {"max_length": max(lengths), "normalizer": NORMALIZER, "rules": rules}
    pairs = [[x[n] for x in (strided, vectors)] for n in range(3)]
    found, expected = (hstu_attention(*(pair[n].float() for pair in pairs), offsets, **call) for n in range(2))
    assert torch.equal(found, expected)


def test_attention_operator_passes_opcheck():
    """torch.compile relies on these properties."""
    from nestrec.ops.attention.hstu_op import hstu_attention_kernel  # noqa: F401

    lengths, vectors, _, _ = random_case(3)
    q, k, v = (x.float().requires_grad_() for x in vectors[:3])
    arguments = (q, k, v, offsets_of(torch.tensor(lengths)), *(None,) * 7, 0, None, True, max(lengths), NORMALIZER)
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(torch.ops.nestrec.hstu_attention, arguments, test_utils=tests)


def test_attention_compiles_into_one_graph():
    """torch.compile traces the flattening of the options up to the operator."""
    lengths, vectors, bias, _ = random_case(3)
    q, k, v = (x.float().requires_grad_() for x in vectors[:3])
    offsets = offsets_of(torch.tensor(lengths))
    table = torch.ones(40, requires_grad=True)
    targets = torch.zeros(len(lengths), dtype=torch.int64)

    def attend(q, k, v, table):
        own = RelativeBias(time_table=table, time_T=bias.time_T, query_time_T=bias.query_time_T)
        rules = AttentionMask(num_targets_B=targets, num_context=1, max_attention_length=9)
        return hstu_attention(
            q, k, v, offsets, max_length=max(lengths), normalizer=NORMALIZER, bias=own, rules=rules
        ).square()

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    inputs = (q, k, v, table)
    expected = torch.autograd.grad(attend(*inputs).sum(), inputs)
    assert all(map(torch.equal, torch.autograd.grad(compiled(*inputs).sum(), inputs), expected))
