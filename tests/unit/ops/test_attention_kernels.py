"""The plain attention kernel in Triton's interpreter: every option, forward and backward, without a GPU."""

import numpy as np
import pytest
import torch

from nestrec.jagged import offsets_of
from nestrec.ops.attention.hstu import hstu_attention, hstu_attention_reference
from nestrec.ops.attention.mask import AttentionRules
from nestrec.ops.attention.relative_bias import RelativeBias, bucket_edges, time_bucket
from nestrec.ops.registry import HAS_TRITON, IS_INTERPRETED

if HAS_TRITON and IS_INTERPRETED:
    import triton
    import triton.language as tl

    from nestrec.ops.attention.time_buckets import time_bucket as kernel_bucket

    @triton.jit
    def _bucket_kernel(x, y, edges, count, SIZE: tl.constexpr):
        i = tl.arange(0, SIZE)
        tl.store(y + i, kernel_bucket(tl.load(x + i), edges, count))


pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.skipif(not (HAS_TRITON and IS_INTERPRETED), reason="needs Triton and TRITON_INTERPRET=1"),
]
NORMALISER = 20.0


def random_case(seed):
    """Lengths, vectors, bias and rules; every option is drawn on its own."""
    draw = np.random.default_rng(seed)
    lengths = draw.choice([0, 1, 2, 7, 17, 31, 32, 33, 40], draw.integers(1, 4)).tolist()
    lengths = lengths if sum(lengths) else [5]
    shape = (sum(lengths), 1, int(draw.choice([8, 20])))
    vectors = [torch.from_numpy(draw.normal(0, 0.7, shape)) for _ in range(4)]
    targets = [int(draw.integers(0, n + 1)) for n in lengths]
    rules = AttentionRules(
        num_targets_B=torch.tensor(targets) if draw.random() < 0.5 else None,
        num_context=int(draw.integers(1, 35)) if draw.random() < 0.4 else 0,
        max_attention_length=int(draw.integers(1, 40)) if draw.random() < 0.4 else None,
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
def test_the_kernel_equals_the_definition(seed):
    lengths, vectors, bias, rules = random_case(seed)
    offsets = offsets_of(torch.tensor(lengths))
    dtype, tolerance = (torch.float32, 2e-6) if seed % 3 else (torch.float16, 3e-3)
    found = results(
        lambda q, k, v, b: hstu_attention(
            q, k, v, offsets, max_length=max(lengths), normaliser=NORMALISER, bias=b, rules=rules
        ),
        vectors,
        bias,
        dtype,
        torch.float32,
    )
    exact = results(
        lambda q, k, v, b: hstu_attention_reference(q, k, v, offsets, normaliser=NORMALISER, bias=b, rules=rules),
        vectors,
        bias,
        torch.float64,
        torch.float64,
    )
    for a, b in zip(found, exact, strict=True):
        assert float((a.double() - b).detach().norm()) <= tolerance * max(float(b.detach().norm()), 1e-3)


def test_time_buckets_are_those_of_float64():
    """Also within rounding of every edge."""
    edges = torch.exp(0.301 * torch.arange(1, 65, dtype=torch.float64))
    delta = torch.cat([edges * (1 + e) for e in (0.0, 1e-15, -1e-15, 3e-9, -3e-9, 1e-7, -1e-7, 0.99)])
    delta[100:200] *= -1.0
    delta[:3] = torch.tensor([0.0, 1.0, -1e30])
    found = torch.empty(len(delta), dtype=torch.int32)
    _bucket_kernel[(1,)](delta, found, bucket_edges(50, delta.device), 50, SIZE=len(delta))
    assert torch.equal(found.long(), time_bucket(delta, 50))


@pytest.mark.parametrize("is_square", [False, True])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_bytes_of_tiles_are_the_buckets_of_their_pairs(is_reversed, is_square):
    """In the order in which a warp group owns the elements of a product."""
    from nestrec.ops.attention.bucket_tiles import SIDE, empty_tiles, fill_tiles

    lengths, draw = [70, 0, 129, 64], np.random.default_rng(5)
    tokens, offsets = sum(lengths), offsets_of(torch.tensor(lengths))
    asked, seen = (torch.from_numpy(draw.integers(0, 10**7, tokens) / 7) for _ in range(2))
    bias = RelativeBias(time_table=torch.zeros(60), time_T=seen, query_time_T=asked)
    found = empty_tiles(bias, offsets, 129, is_square=is_square)
    fill_tiles(found, bias, offsets, is_square=is_square, is_reversed=is_reversed)
    tiles = found.tiles.view(torch.uint8).view(-1, SIDE * SIDE)
    n = torch.arange(SIDE * SIDE)
    thread, byte = n // 32, n % 32
    row = thread // 32 * 16 + byte // 2 % 2 * 8 + thread // 4 % 8
    column = byte // 4 * 8 + thread % 4 * 2 + byte % 2
    for first, start, length in zip(found.first_B.tolist(), offsets.tolist(), lengths, strict=False):
        blocks = -(-length // SIDE)
        for a in range(blocks):
            for b in range(blocks if is_square else a + 1):
                tile = tiles[first + (a * blocks if is_square else a * (a + 1) // 2) + b]
                i, j = (a * SIDE + column, b * SIDE + row) if is_reversed else (a * SIDE + row, b * SIDE + column)
                is_inside = (i < length) & (j < length)
                i, j = start + i[is_inside], start + j[is_inside]
                assert torch.equal(tile[is_inside].long(), time_bucket(asked[i] - seen[j], 59))


def test_strided_inputs_give_the_results_of_their_copies():
    lengths, vectors, _, rules = random_case(2)
    offsets = offsets_of(torch.tensor(lengths))
    strided = [torch.stack([x, x], dim=-1).flatten(2).float()[:, :, ::2] for x in vectors]
    assert not strided[0].is_contiguous()
    call = {"max_length": max(lengths), "normaliser": NORMALISER, "rules": rules}
    pairs = [[x[n] for x in (strided, vectors)] for n in range(3)]
    found, expected = (hstu_attention(*(pair[n].float() for pair in pairs), offsets, **call) for n in range(2))
    assert torch.equal(found, expected)


def test_the_operator_declares_its_shapes_and_gradients():
    """What torch.compile relies on."""
    from nestrec.ops.attention.hstu_op import hstu_attention_kernel  # noqa: F401

    lengths, vectors, _, _ = random_case(3)
    q, k, v = (x.float().requires_grad_() for x in vectors[:3])
    arguments = (q, k, v, offsets_of(torch.tensor(lengths)), *(None,) * 6, 0, None, True, max(lengths), NORMALISER)
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(torch.ops.nestrec.hstu_attention, arguments, test_utils=tests)
