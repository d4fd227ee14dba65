"""Measure one HSTU layer, forward and backward: fused, with activation checkpointing, and in plain PyTorch.

impl         implementation
fused        row kernels, attention kernel and cuBLAS, as in the model
recompute    the same with activation checkpointing, which stores less for the backward pass
eager        reference implementation in PyTorch with autocast, on padded blocks

TFLOP/s are computed from the operations of `harness.step_flops`. The upper bounds, a large bf16 matrix product and a
device copy, are measured in the same run. The error is that of the output and of the gradient of the input, compared
with float64, on the first sequences.

    nestrec bench layer --lengths u4096,lognormal:mean=900,max=8192,count=200 --heads 8x64 --biases none,tables
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.base.random import as_int64
from nestrec.data.flat_arrays import positions, sample_keys, token_keys
from nestrec.distributed.topology import check_device
from nestrec.models import HSTUConfig, SequenceInfo
from nestrec.models.hstu import NORM_EPS, HSTULayer
from nestrec.ops.attention.hstu_attention import hstu_attention_padded
from nestrec.ops.layers.fused_layers import Dropout, gated_output_reference, norm_projection_reference
from nestrec_bench.bench import Bench
from nestrec_bench.harness.length_shapes import join_shapes, lengths_of
from nestrec_bench.harness.step_flops import FORMULA, step_flops
from nestrec_bench.kernels.attention_bench import heads_and_dim
from nestrec_bench.kernels.kernel_timing import ceilings, medians_ms

CHECKED_TOKENS = 2048


Biases = Literal["none", "tables", "functional"]


@config
class LayerBenchConfig:
    """Options of the benchmark."""

    lengths: tuple[str, ...] = ("u4096", "u8192x32", "logn", "kuai1k")
    """Sequence lengths: named shapes, uN, uNxCOUNT, lognormal:mean=...,max=...,count=..., files of lengths, prepared
    datasets."""
    biases: tuple[Biases, ...] = ("none", "tables")
    """Relative biases: none, position and time tables, or a position table and a function of time."""
    dim: int = 1024
    """Width of the model."""
    heads: tuple[str, ...] = ("4x256",)
    """Numbers of heads x head dimensions."""
    dropout: float = 0.2
    """Dropout rate of the layer."""
    impls: tuple[Literal["fused", "recompute", "eager"], ...] = ("fused", "recompute", "eager")
    """Names of the implementations to measure."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Device to measure; `cpu` is intended for tests."""
    repeats: int = 10
    """Number of timed passes, after three warm-up passes."""


def measure_layers(bench: LayerBenchConfig) -> Iterator[dict[str, Any]]:
    """Measure each implementation, shape and number of heads, and yield one row each, after the upper bounds."""
    check_device(bench.device)
    if bench.device == "cuda":
        yield from ceilings(bench.repeats)
    shapes = join_shapes(bench.lengths)
    for shape, heads, biases, impl in itertools.product(shapes, bench.heads, bench.biases, bench.impls):
        lengths = lengths_of(shape)
        (num_heads, head_dim) = heads_and_dim(heads)
        row = {"impl": impl, "heads": num_heads, "dim": head_dim, "lengths": shape, "biases": biases}
        if impl == "eager" and not _fits(lengths, num_heads, bench.device):
            yield row | {"error": "the padded blocks do not fit into memory"}
            continue
        cfg = HSTUConfig(
            dim=bench.dim, num_layers=1, num_heads=num_heads, head_dim=head_dim, max_length=int(lengths.max()),
            dropout=bench.dropout, activation_checkpointing=impl == "recompute", **bias_fields(biases),
        )  # fmt: skip
        yield row | _measure(bench, cfg, lengths, impl)
        if bench.device == "cuda":
            torch.cuda.empty_cache()


def _fits(lengths: NDArray[np.int64], num_heads: int, device: str) -> bool:
    """Return whether six bf16 blocks (sequences, heads, N, N) fit, the peak memory of eager attention."""
    if device != "cuda":
        return True
    num_bytes = 6 * 2 * len(lengths) * num_heads * int(lengths.max()) ** 2
    return num_bytes < torch.cuda.get_device_properties(0).total_memory


def bias_fields(biases: Biases) -> dict[str, Any]:
    """Return the fields of a model config that select the biases."""
    encoding = "functional" if biases == "functional" else "buckets"
    return {"position_bias": biases != "none", "time_bias": biases != "none", "time_encoding": encoding}


def _measure(bench: LayerBenchConfig, cfg: HSTUConfig, lengths: NDArray[np.int64], impl: str) -> dict[str, Any]:
    torch.manual_seed(0)
    layer = HSTULayer(cfg, site=1).to(bench.device)
    info = info_of(lengths, bench.device)
    dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
    x, grad = (torch.randn(int(lengths.sum()), cfg.dim, device=bench.device, dtype=dtype) for _ in range(2))
    x.requires_grad_()
    run = eager_layer if impl == "eager" else _fused
    forward_ms, backward_ms, peak = _times(lambda: run(layer, x, info), [x, *layer.parameters()], grad, bench)
    error = _error(run, layer, lengths, bench.device)
    flops = step_flops(cfg, lengths)
    seconds = (forward_ms + backward_ms) / 1e3
    return {
        "tokens": int(lengths.sum()), "fwd_ms": round(forward_ms, 3), "bwd_ms": round(backward_ms, 3),
        "tflops": round(flops.tflops(seconds), 1), "mfu": round(flops.mfu(seconds), 4),
        "rel_err": float(f"{error:.2e}"), "peak_gib": peak,
    }  # fmt: skip


def info_of(lengths: NDArray[np.int64], device: str) -> SequenceInfo:
    """Return the inputs of a layer for sequences of these lengths, with one event per hour."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    keys = token_keys(sample_keys(0, 0, np.arange(len(lengths))), offsets)
    time_T = torch.arange(int(offsets[-1]), dtype=torch.float64, device=device) * 3600.0
    return SequenceInfo(
        offsets=torch.from_numpy(offsets).to(device), max_length=int(lengths.max()),
        position_T=torch.from_numpy(positions(offsets)).to(device), token_key_T=as_int64(keys).to(device),
        time_T=time_T, query_time_T=time_T,
    )  # fmt: skip


Run = Callable[[HSTULayer, torch.Tensor, SequenceInfo], torch.Tensor]
"""Function that computes a layer and adds its residual connection."""


def _fused(layer: HSTULayer, x: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
    total, added = layer(x, None, info)
    return total + added  # type: ignore[no-any-return]


def eager_layer(layer: HSTULayer, x: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
    """Compute the reference implementation of a layer, operator by operator."""
    cfg = layer.cfg
    projected = norm_projection_reference(
        x, None, layer.uvqk, (cfg.num_heads * cfg.head_dim,) * 4, norm="layer", eps=NORM_EPS
    )
    v, q, k = (part.reshape(len(x), cfg.num_heads, cfg.head_dim) for part in projected.parts)
    attended = hstu_attention_padded(
        q,
        k,
        v,
        info.offsets,
        max_length=info.max_length,
        normalizer=layer.normalizer,
        bias=layer.bias(info),
        rules=layer.rules,
    ).flatten(1)
    added = gated_output_reference(
        (attended,), projected.gate, layer.output.weight, layer.output.bias,
        Dropout(info.token_key_T, layer.site, cfg.dropout), norm="layer", eps=NORM_EPS,
    )  # fmt: skip
    return x + added


def _autocast(x: torch.Tensor) -> torch.autocast:
    return torch.autocast(x.device.type, torch.bfloat16, enabled=x.dtype == torch.bfloat16)


def _times(
    run: Callable[[], torch.Tensor], leaves: list[torch.Tensor], grad: torch.Tensor, bench: LayerBenchConfig
) -> tuple[float, float, float]:
    """Return the median times of the forward and backward pass in milliseconds, and the added peak memory in GiB."""
    before = _memory(bench.device)
    out = list[torch.Tensor]()

    def forward(_: int) -> None:
        out.clear()
        with _autocast(grad):
            out.append(run())

    calls = [forward, lambda _: torch.autograd.grad(out.pop(), leaves, grad)]
    forward_ms, backward_ms = medians_ms(calls, bench.repeats, bench.device)
    peak = torch.cuda.max_memory_allocated() - before if bench.device == "cuda" else 0
    return forward_ms, backward_ms, round(peak / 2**30, 2)


def _memory(device: str) -> int:
    if device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _error(run: Run, layer: HSTULayer, lengths: NDArray[np.int64], device: str) -> float:
    """Return the larger relative error of the output and the input gradient, compared with float64.

    The sequences are truncated.
    """
    short = np.minimum(lengths, 512)
    short = short[: max(1, int(np.searchsorted(short.cumsum(), CHECKED_TOKENS)))]
    info = info_of(short, device)
    x, grad = (torch.randn(int(short.sum()), layer.cfg.dim, device=device, dtype=torch.float64) for _ in range(2))
    exact = HSTULayer(layer.cfg, site=layer.site).to(device, torch.float64)
    exact.load_state_dict(layer.state_dict())
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    found = _output_and_gradient(run, layer, x.to(dtype), grad.to(dtype), info)
    expected = _output_and_gradient(eager_layer, exact, x, grad, info)
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


def _output_and_gradient(
    run: Run, layer: HSTULayer, x: torch.Tensor, grad: torch.Tensor, info: SequenceInfo
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.requires_grad_()
    with _autocast(x):
        out = run(layer, x, info)
    return out.detach(), torch.autograd.grad(out, x, grad)[0]


BENCH = Bench(
    config=LayerBenchConfig,
    measure=measure_layers,
    show=lambda rows, more: [FORMULA, ("one HSTU layer, forward and backward", rows)],
)
