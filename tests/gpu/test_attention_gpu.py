"""Attention kernels on a GPU: as exact as eager PyTorch of the same precision, deterministic, no out-of-bounds reads.

Errors are relative to float64, in the norm of the full tensor. The kernel may have twice the error of the padded
PyTorch version in the precision of the kernel.
"""

import numpy as np
import pytest
import torch

from nestrec.jagged import offsets_of
from nestrec.ops.attention.hstu_attention import hstu_attention, hstu_attention_padded
from nestrec.ops.attention.mask_and_bias import AttentionMask, RelativeBias, semi_local

pytestmark = pytest.mark.gpu
OPTIONS = [
    "plain", "targets", "context", "window", "semi-local", "position", "time", "function", "both",
    "semi-local and both", "all rules", "rules and position", "everything", "position and function",
]  # fmt: skip
DIMS = [24, 64, 96, 128, 256]
SHAPES_EACH = 15  # times 5 dims and 14 options: 1,050 batches
EDGES = [0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 384, 513]
NORMALIZER = 300.0


def random_lengths(draw):
    count = int(draw.integers(1, 9))
    edges = draw.choice(EDGES, count)
    others = draw.integers(0, 640, count)
    return np.where(draw.random(count) < 0.5, edges, others).tolist()


def random_vectors(draw, layout, shape, dtype):
    """Return q, k, v and the gradient of the output, in one of the memory layouts that callers use."""
    tokens, heads, dim = shape
    generator = torch.Generator("cuda").manual_seed(int(draw.integers(1 << 30)))
    make = lambda *s: torch.randn(*s, generator=generator, device="cuda").to(dtype)  # noqa: E731
    if layout == "parts of one product":
        return [x.view(shape) for x in make(tokens, 4 * heads * dim).chunk(4, dim=1)]
    if layout == "heads first":
        return [make(heads, tokens, dim).transpose(0, 1) for _ in range(4)]
    if layout == "every second element":
        return [make(tokens, heads, 2 * dim)[:, :, ::2] for _ in range(4)]
    return [make(*shape) for _ in range(4)]


LAYOUTS = ["contiguous", "parts of one product", "heads first", "every second element"]


def random_rules(draw, option, lengths):
    has = lambda name: option in (name, "all rules", "rules and position", "everything")  # noqa: E731
    if option.startswith("semi-local"):
        return semi_local(int(draw.integers(1, 300)), int(draw.integers(0, 150)))
    targets = torch.tensor([int(draw.integers(0, n + 1)) for n in lengths], device="cuda") if has("targets") else None
    return AttentionMask(
        num_targets_B=targets,
        num_context=int(draw.integers(1, 80)) if has("context") else 0,
        max_attention_length=int(draw.integers(1, 300)) if has("window") else None,
    )


def random_bias(draw, option, lengths):
    both = ("both", "semi-local and both", "everything")
    has = lambda name: option in (name, f"rules and {name}", f"{name} and function", *both)  # noqa: E731
    tokens = sum(lengths)
    longest = max(lengths)
    table = lambda size: torch.from_numpy(draw.normal(0, 0.5, size)).cuda().requires_grad_()  # noqa: E731
    time = torch.from_numpy(np.cumsum(draw.integers(0, 10**5, tokens)).astype(np.float64)).cuda()
    wait = torch.from_numpy(draw.integers(0, 10**4, tokens).astype(np.float64)).cuda()
    return RelativeBias(
        position_table=table(2 * longest + 9) if has("position") else None,
        time_table=table(65) if has("time") else None,
        time_function=torch.tensor([0.7, 10.0, -0.7], device="cuda") if option.endswith("function") else None,
        time_T=time,
        query_time_T=time + wait,
    )


def results(attend, vectors, bias, dtype):
    """Return the output and all gradients in `dtype`; tables stay in float32 or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v, grad = vectors
    inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    originals = (bias.position_table, bias.time_table, bias.time_function)
    tables = [None if t is None else t.detach().to(wide).requires_grad_() for t in originals]
    own = RelativeBias(
        position_table=tables[0],
        time_table=tables[1],
        time_function=tables[2],
        time_T=bias.time_T,
        query_time_T=bias.query_time_T,
    )
    out = attend(*inputs, own)
    wanted = inputs + [t for t in tables if t is not None]
    return [out.detach(), *torch.autograd.grad(out, wanted, grad.to(dtype))]


def error(found, exact):
    assert not found.isnan().any()
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-30))


def compare(lengths, vectors, bias, rules, dtype):
    offsets = offsets_of(torch.tensor(lengths)).cuda()
    shared = {"max_length": max(lengths), "normalizer": NORMALIZER, "rules": rules}
    ours = lambda q, k, v, b: hstu_attention(q, k, v, offsets, bias=b, **shared)  # noqa: E731
    eager = lambda q, k, v, b: hstu_attention_padded(q, k, v, offsets, bias=b, **shared)  # noqa: E731
    exact = results(eager, vectors, bias, torch.float64)
    found, usual = results(ours, vectors, bias, dtype), results(eager, vectors, bias, dtype)
    names = ["out", "dq", "dk", "dv", "table", "second table"]
    for name, a, b, c in zip(names, found, usual, exact, strict=False):
        # The three scalars of a time function are sums over all pairs; below one unit of the dtype, errors are random.
        floor = torch.finfo(dtype).eps if a.numel() == 3 else 1e-7
        assert error(a, c) <= 2 * error(b, c) + floor, (name, error(a, c), error(b, c), lengths)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dim", DIMS)
def test_attention_error_is_at_most_twice_eager(dim, option):
    draw = np.random.default_rng([dim, OPTIONS.index(option)])
    for number in range(SHAPES_EACH):
        # Each dtype compiles its own kernels, so float16 is tested in one dimension and without the bucketed time bias.
        has_half = dim == 64 and number % 4 == 0 and option not in ("time", "everything")
        dtype = torch.float16 if has_half else torch.bfloat16
        lengths = random_lengths(draw)
        if sum(lengths) == 0:
            lengths[0] = 5
        shape = (sum(lengths), int(draw.integers(1, 5)), dim)
        vectors = random_vectors(draw, LAYOUTS[number % 4], shape, torch.float32)
        # Scores have a standard deviation of 1 to 3, as in training, in every dimension.
        vectors[0] = vectors[0] * float(draw.uniform(1, 3)) * dim**-0.5
        vectors = [random_vectors(draw, LAYOUTS[number % 4], shape, dtype)[0].copy_(x) for x in vectors]
        compare(lengths, vectors, random_bias(draw, option, lengths), random_rules(draw, option, lengths), dtype)


def event_times(kind, count, draw):
    """Return event times in seconds: one per hour, or sessions of events seconds apart with days between sessions."""
    if kind == "hours":
        return np.arange(count) * 3600.0
    return np.cumsum(draw.integers(1, 20, count) * np.where(draw.random(count) < 0.02, 1e6, 1.0))


@pytest.mark.parametrize("kind", ["hours", "sessions"])
@pytest.mark.parametrize("dim", [64, 128])
def test_attention_time_function_long_history_error_is_bounded(dim, kind):
    """Most pairs are far apart and share a bias."""
    draw = np.random.default_rng(dim)
    for lengths, scalars in ([1300, 0, 257], [0.1, 11.4, -0.7]), ([1000, 130], [1.5, 9.0, -0.2]):
        time = torch.from_numpy(event_times(kind, sum(lengths), draw)).cuda()
        function = torch.tensor(scalars, device="cuda")
        vectors = random_vectors(draw, "contiguous", (sum(lengths), 3, dim), torch.float32)
        vectors[0] = vectors[0] * 2 * dim**-0.5
        bias = RelativeBias(time_function=function, time_T=time, query_time_T=time + 9.0)
        compare(lengths, [x.bfloat16() for x in vectors], bias, AttentionMask(), torch.bfloat16)


@pytest.mark.parametrize("option", ["plain", "everything"])
def test_attention_float32_error_is_bounded(option):
    assert torch.get_float32_matmul_precision() == "highest"
    draw = np.random.default_rng(3)
    for _ in range(3):
        lengths = [*random_lengths(draw), 70]
        vectors = random_vectors(draw, "contiguous", (sum(lengths), 2, 48), torch.float32)
        vectors[0] *= 0.3
        bias = random_bias(draw, option, lengths)
        rules = random_rules(draw, option, lengths)
        compare(lengths, vectors, bias, rules, torch.float32)


@pytest.mark.parametrize("option", ["plain", "position", "both", "function", "position and function", "everything"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_attention_is_deterministic(dim, option):
    draw = np.random.default_rng(dim)
    lengths = [700, 0, 33, 1300, 257, 64, 5, 900]
    vectors = random_vectors(draw, "contiguous", (sum(lengths), 4, dim), torch.bfloat16)
    bias = random_bias(draw, option, lengths)
    rules = random_rules(draw, option, lengths)
    offsets = offsets_of(torch.tensor(lengths)).cuda()

    def attend(q, k, v, b):
        return hstu_attention(q, k, v, offsets, max_length=1300, normalizer=NORMALIZER, bias=b, rules=rules)

    first = results(attend, vectors, bias, torch.bfloat16)
    for _ in range(19):
        for a, b in zip(first, results(attend, vectors, bias, torch.bfloat16), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("option", ["plain", "both", "function", "all rules", "everything"])
@pytest.mark.parametrize("dim", [48, 64, 128, 256])
def test_attention_never_reads_outside_a_sequence(dim, option):
    """Other sequences and the memory before and after the batch are filled with NaN."""
    draw = np.random.default_rng(dim)
    lengths = [130, 70, 1, 200, 64]
    tokens = sum(lengths)
    margin = 300
    clean = random_vectors(draw, "contiguous", (tokens, 2, dim), torch.bfloat16)
    bias = random_bias(draw, option, lengths)
    rules = random_rules(draw, option, lengths)
    offsets = offsets_of(torch.tensor(lengths)).cuda()
    attend = lambda q, k, v, b: hstu_attention(  # noqa: E731
        q, k, v, offsets, max_length=200, normalizer=NORMALIZER, bias=b, rules=rules
    )
    expected = results(attend, clean, bias, torch.bfloat16)[:4]
    around = torch.full((4, tokens + 2 * margin, 2, dim), float("nan"), dtype=torch.bfloat16, device="cuda")
    for sequence in range(len(lengths)):
        rows = slice(int(offsets[sequence]), int(offsets[sequence + 1]))
        around[:] = float("nan")
        for n, x in enumerate(clean):
            around[n, margin + rows.start : margin + rows.stop] = x[rows]
        poisoned = [around[n, margin : margin + tokens] for n in range(4)]
        found = results(attend, poisoned, bias, torch.bfloat16)[:4]
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a[rows], b[rows])


def test_attention_accepts_empty_sequences():
    for lengths in ([], [0], [0, 0, 3]):
        offsets = offsets_of(torch.tensor(lengths, dtype=torch.int64)).cuda()
        q = torch.randn(sum(lengths), 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        out = hstu_attention(q, q, q, offsets, max_length=3, normalizer=1.0)
        out.sum().backward()
        assert out.shape == q.shape == q.grad.shape


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside the compiler
def test_attention_compiled_layer_keeps_operator():
    """Check that torch.compile traces one operator with its shapes, in forward and backward."""
    lengths = [100, 30]
    offsets = offsets_of(torch.tensor(lengths)).cuda()
    x = torch.randn(130, 3 * 2 * 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def layer(x):
        q, k, v = (part.view(-1, 2, 64) for part in x.chunk(3, dim=1))
        return hstu_attention(q, k, v, offsets, max_length=100, normalizer=100.0).flatten(1).tanh()

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    eager, fused = (torch.autograd.grad(f(x).float().square().sum(), x)[0].double() for f in (layer, compiled))
    # Eager code rounds to bfloat16 after every operation, compiled code after each fused group.
    assert float((fused - eager).norm() / eager.norm()) < 2e-2
