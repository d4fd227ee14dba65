"""Fused layer kernels have at most twice the error of plain PyTorch operators of the same precision.

Under TRITON_INTERPRET=1 the same tests run on a CPU, in float16.
"""

# ruff: noqa: PLR0917

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from nestrec.models import HSTU, FuXi, FuXiConfig, HSTUConfig, SequenceInfo
from nestrec.models.backbone_spec import AttentionSpanConfig
from nestrec.ops.attention import bias_only
from nestrec.ops.attention.bias_only import bias_attention, bias_attention_padded
from nestrec.ops.attention.mask_and_bias import PLAIN, RelativeBias, semi_local
from nestrec.ops.attention.pair_tiles import pair_buckets, plan_tiles
from nestrec.ops.embedding.row_gather import HalfPrecisionRows
from nestrec.ops.kernel_op import IS_INTERPRETED
from nestrec.ops.layers.fused_layers import (
    Dropout,
    feed_forward,
    feed_forward_reference,
    gated_output,
    gated_output_reference,
    norm_projection,
    norm_projection_reference,
    recompute_saved_parts,
)
from nestrec.ops.layers.token_input import token_input, token_input_reference, unit_rows, unit_rows_reference
from nestrec_bench.kernels.layer_bench import info_of

pytestmark = pytest.mark.gpu
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16
WIDTHS = [(40, 24, torch.float32), (48, 16, HALF)] if IS_INTERPRETED else [(100, 52, torch.float32), (1024, 1024, HALF)]
"""Model width, part width and dtype; each combination compiles its own kernels."""
TOKENS = [1, 37, 130] if IS_INTERPRETED else [1, 2, 16, 63, 129, 1000]
GENERATED = 0 if IS_INTERPRETED else 30


def token_counts():
    return [*TOKENS, *np.random.default_rng(0).integers(1, 3000, GENERATED).tolist()]


def random_leaves(*shapes, dtype=torch.float64):
    return [torch.randn(shape, dtype=dtype, device=DEVICE) for shape in shapes]


def keys_of(tokens):
    return torch.randint(-(2**62), 2**62, (tokens,), device=DEVICE)


def compare(fused, plain, leaves, dtype, *, factor=2.0, floor=2e-7):
    """Check that outputs and gradients of `fused` have at most `factor` times the error of `plain` in `dtype`."""
    exact = results(plain, leaves, torch.float64)
    ours, theirs = results(fused, leaves, dtype), results(plain, leaves, dtype)
    for number, (a, b, c) in enumerate(zip(ours, theirs, exact, strict=True)):
        size = c.norm().clamp(min=1e-12)
        error, allowed = (a.double() - c).norm() / size, (b.double() - c).norm() / size
        assert error <= factor * allowed + floor, (number, float(error), float(allowed))


def results(function, leaves, dtype):
    own = [leaf.to(dtype).requires_grad_() for leaf in leaves]
    outputs = function(*own)
    torch.manual_seed(9)
    grads = [torch.randn(o.shape, dtype=torch.float64, device=DEVICE).to(o.dtype) for o in outputs]
    found = torch.autograd.grad(outputs, own, grads)
    return [t.detach() for t in (*outputs, *found)]


@pytest.mark.parametrize(("num_parts", "norm"), [(1, "layer"), (2, "rms"), (3, "rms")])
@pytest.mark.parametrize(("dim", "width", "dtype"), WIDTHS)
def test_layer_inputs_and_outputs_equal_reference(dim, width, dtype, num_parts, norm):
    for tokens in token_counts():
        check_layer(tokens, dim, width, dtype, num_parts, norm)


def check_layer(tokens, dim, width, dtype, num_parts, norm):
    torch.manual_seed(tokens)
    widths = (num_parts * width, width, width, width)
    leaves = random_leaves((tokens, dim), (tokens, dim), (dim, sum(widths)), (dim, num_parts * width), (dim,))
    leaves[2] /= dim**0.5
    leaves[3] /= (num_parts * width) ** 0.5
    drop = Dropout(keys_of(tokens), 3, 0.25)

    def run(project, gated, x, delta, weight, output, bias, **options):
        projected = project(x, delta, weight, widths, norm=norm, eps=1e-6, **options)
        v, q, k = projected.parts
        with recompute_saved_parts(projected):
            attended = [v * q + 0.5, k * v + q, q * k][:num_parts]
        if options:
            options["packed"] = projected.packed
        added = gated(attended, projected.gate, output, bias, drop, norm=norm, eps=1e-6, **options)
        return projected.total * 1.0, added

    def plain(*leaves):
        return run(norm_projection_reference, gated_output_reference, *leaves)

    for recompute in (False, True):
        compare(lambda *own: run(norm_projection, gated_output, *own, recompute=recompute), plain, leaves, dtype)  # noqa: B023


def test_layer_gate_gradient_accepts_any_strides():
    """Gradients are the same without the shared buffer, and if the gate is used a second time."""
    torch.manual_seed(0)
    leaves = random_leaves((33, 16), (16, 32))

    def run(project, x, weight):
        projected = project(x, None, weight, (8, 8, 8, 8), norm="layer", eps=1e-6)
        v, q, k = projected.parts
        return (projected.gate * 2.0 + projected.gate.square() * v, q - k)

    compare(
        lambda *own: run(norm_projection, *own),
        lambda *own: run(norm_projection_reference, *own),
        leaves,
        torch.float32,
    )


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("dim", "width", "dtype"), WIDTHS)
def test_feed_forward_equals_reference(dim, width, dtype, tokens):
    torch.manual_seed(tokens)
    leaves = random_leaves((tokens, dim), (tokens, dim), (dim, 2 * width), (width, dim))
    leaves[2] /= dim**0.5
    leaves[3] /= width**0.5
    drop = Dropout(keys_of(tokens), 5, 0.5)
    for recompute in (False, True):
        compare(
            lambda *own: feed_forward(*own, drop, eps=1e-6, recompute=recompute),  # noqa: B023
            lambda *own: feed_forward_reference(*own, drop, eps=1e-6),
            leaves,
            dtype,
        )


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("probability", [0.0, 0.3])
def test_token_input_and_position_gradients(probability, dtype):
    torch.manual_seed(1)
    lengths = np.array([0, 5, 1, 21, 0, 13])
    info = info_of(lengths, DEVICE)
    leaves = random_leaves((40, 72), (30, 72))
    drop = Dropout(info.token_key_T, 0, probability)
    compare(
        lambda x, table: [token_input(x, table, info.position_T, info.offsets, factor=3.0, drop=drop)],
        lambda x, table: [token_input_reference(x, table, info.position_T, factor=3.0, drop=drop)],
        leaves,
        dtype,
    )


def test_unit_rows_accept_zero_and_tiny_rows():
    torch.manual_seed(2)
    (x,) = random_leaves((50, 20))
    x[3] = 0.0
    x[4] *= 1e-9
    compare(lambda x: [unit_rows(x, 20.0, 1e-6)], lambda x: [unit_rows_reference(x, 20.0, 1e-6)], [x], torch.float32)


def test_unit_rows_half_precision_equal_float32_copy():
    """The output is bitwise identical to that of a float32 copy, and gradients are float32."""
    torch.manual_seed(0)
    values, weight = torch.randn(50, 20, device=DEVICE).to(HALF), torch.randn(50, 20, device=DEVICE)
    stored = HalfPrecisionRows.of(values)
    copied = values.float().requires_grad_()
    outputs = [unit_rows(rows, 20.0, 1e-6) for rows in (stored, copied)]
    for output in outputs:
        (output * weight).sum().backward()
    assert torch.equal(*outputs)
    assert stored.anchor.grad.dtype == torch.float32
    assert torch.equal(stored.anchor.grad, copied.grad)


BATCHES = [[3, 0, 1, 40], [130, 5]] if IS_INTERPRETED else [[3, 0, 1, 40], [130, 5, 300, 128], [1000, 17], [64] * 9]


CHANNELS = [(40, torch.float32), (40, HALF)] if IS_INTERPRETED else [(40, torch.float32), (40, HALF), (1024, HALF)]


@pytest.mark.parametrize(("width", "dtype"), CHANNELS)
@pytest.mark.parametrize("times", ["table", "precomputed", "function", "none"])
@pytest.mark.parametrize("lengths", BATCHES)
def test_bias_only_attention_equals_padded(lengths, times, width, dtype):
    check_bias_attention(lengths, times, width, dtype)


WINDOWS = [("precomputed", 50, 3), ("function", 200, 130)]
MORE_WINDOWS = [("table", 1, 0), ("table", 200, 130), ("function", 128, 256), ("precomputed", 500, 7)]


@pytest.mark.parametrize(("times", "window", "prefix"), WINDOWS if IS_INTERPRETED else WINDOWS + MORE_WINDOWS)
def test_bias_only_attention_windows_equal_padded(times, window, prefix):
    lengths = [270, 0, 129] if IS_INTERPRETED else [130, 5, 1000, 128, 0]
    check_bias_attention(lengths, times, 24, torch.float32, rules=semi_local(window, prefix))


def test_bias_only_attention_with_many_buckets(monkeypatch):
    """Blocks of rows are computed one at a time, and bucket indices need more than a byte."""
    monkeypatch.setattr(bias_only, "MAX_WEIGHTS", 1)
    check_bias_attention([130, 0, 5], "table", 40, HALF, num_buckets=300)


@contextmanager
def poisoned_memory():
    """Fill empty tensors with NaN. CPU only: the reference needs operators without deterministic CUDA versions."""
    torch.use_deterministic_algorithms(IS_INTERPRETED)
    yield
    torch.use_deterministic_algorithms(False)


def check_bias_attention(lengths, times, width, dtype, num_buckets=40, rules=PLAIN):
    torch.manual_seed(sum(lengths))
    torch.set_float32_matmul_precision("highest")
    tokens = sum(lengths)
    longest = max(lengths)
    offsets = torch.tensor([0, *np.cumsum(lengths)], device=DEVICE)
    time = torch.cat([torch.rand(n, dtype=torch.float64).cumsum(0) * 1e4 for n in lengths]).to(DEVICE)
    sizes = {"table": [(num_buckets + 1,)], "function": [(3,)], "none": []}
    buckets = None
    if times == "precomputed":
        plan, _ = plan_tiles(offsets, tokens, longest, is_square=False)
        times = "table"
        buckets = pair_buckets(time, time + 10.0, offsets, plan, num_buckets)
    leaves = random_leaves((tokens, width + 32), (2 * longest + 21,), *sizes[times])

    def run(attend, wide, position, learned=None):
        # Parameters for which the function decreases within the times of the batch.
        function = learned + learned.new_tensor([0.0, 9.0, -0.5]) if times == "function" else None
        bias = RelativeBias(
            position_table=position,
            time_table=learned if times == "table" else None,
            time_function=function,
            time_T=None if times == "none" else time,
            query_time_T=None if times == "none" else time + 10.0,
            buckets=buckets,
        )
        return attend(wide[:, :width], offsets, bias, max_length=longest, rules=rules)

    with poisoned_memory():
        compare(
            lambda *own: run(bias_attention, *own),
            lambda *own: run(bias_attention_padded, *own),
            leaves,
            dtype,
            # The three scalars are sums over all pairs; below one unit of the dtype, errors are random.
            floor=max(2e-6, torch.finfo(dtype).eps) if times == "function" else 2e-6,
        )


MODELS = {
    "hstu": lambda **options: HSTU(HSTUConfig(dim=64, num_heads=2, head_dim=32, max_length=160, **options)),
    "fuxi": lambda **options: FuXi(FuXiConfig(dim=64, num_heads=2, head_dim=32, ffn_dim=64, max_length=160, **options)),
}


def info_with_times(lengths):
    info = info_of(lengths, DEVICE)
    time = info.position_T.double() * 77.0
    return SequenceInfo(info.offsets, info.max_length, info.position_T, info.token_key_T, time, time + 50.0)


@pytest.mark.skipif(IS_INTERPRETED, reason="too slow; the kernels are tested above")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_model_on_gpu_with_dropout_equals_cpu(kind, recompute):
    """Dropout masks are the same; float32 results are equal up to rounding."""
    check_model(kind, activation_checkpointing=recompute)


LONG_HISTORIES = {
    "function of time": {"time_encoding": "functional"},
    "semi-local": {"attention": AttentionSpanConfig(window=20, num_prefix_tokens=9)},
    "truncated": {"num_layers": 3, "attention": AttentionSpanConfig(window=30, truncate_to=20, truncate_step=16)},
}


@pytest.mark.skipif(IS_INTERPRETED, reason="too slow; the kernels are tested above")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("options", LONG_HISTORIES)
def test_model_on_gpu_with_long_histories_equals_cpu(kind, options):
    check_model(kind, **LONG_HISTORIES[options], **({"time_bias": True} if kind == "hstu" else {}))


def check_model(kind, **options):
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
    model = MODELS[kind](**options)
    lengths = np.array([7, 0, 160, 33, 1])
    info = info_with_times(lengths)
    x = torch.randn(201, 64)
    found = model.cuda()(x.cuda(), info)
    found.square().sum().backward()
    gradients = {name: p.grad.cpu() for name, p in model.named_parameters()}
    model.zero_grad()
    on_cpu = SequenceInfo(
        info.offsets.cpu(),
        info.max_length,
        info.position_T.cpu(),
        info.token_key_T.cpu(),
        info.time_T.cpu(),
        info.query_time_T.cpu(),
    )
    expected = model.cpu()(x, on_cpu)
    expected.square().sum().backward()
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
    for name, parameter in model.named_parameters():
        scale = parameter.grad.abs().max()
        assert (gradients[name] - parameter.grad).abs().max() <= 1e-3 * scale, name


@pytest.mark.skipif(IS_INTERPRETED, reason="needs CUDA autocast")
@pytest.mark.parametrize("kind", MODELS)
def test_activation_checkpointing_is_bitwise_and_saves_memory(kind):
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = MODELS[kind](activation_checkpointing=recompute).cuda()
        info = info_with_times(np.full(200, 160))
        x = torch.randn(32_000, 64, device="cuda", requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16):
            out = model(x, info)
        allocated = torch.cuda.memory_allocated()
        out.float().square().sum().backward()
        results.append((allocated, out, x.grad, model.layers[0].uvqk.grad))
    (stored_bytes, *first), (recomputed_bytes, *second) = results
    assert recomputed_bytes < stored_bytes
    for a, b in zip(first[:2], second[:2], strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside the compiler
def test_fused_layers_compile():
    torch.manual_seed(0)
    leaves = random_leaves((64, 32), (64, 32), (32, 64), (32, 16), (32,), dtype=torch.float32)
    drop = Dropout(keys_of(64), 1, 0.2)

    def run(x, delta, weight, output, bias):
        projected = norm_projection(x, delta, weight, (16, 16, 16, 16), norm="layer", eps=1e-6)
        v, q, k = projected.parts
        return projected.total * 1.0, gated_output(
            [v * q + k], projected.gate, output, bias, drop, norm="layer", eps=1e-6
        )

    eager, compiled = (results(f, leaves, torch.float32) for f in (run, torch.compile(run, backend="aot_eager")))
    for a, b in zip(eager, compiled, strict=True):
        torch.testing.assert_close(a, b)
