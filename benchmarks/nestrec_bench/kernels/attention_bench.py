"""Compare HSTU attention on this GPU with the attention functions of PyTorch.

FLOPs are those of exact causal attention over valid tokens, for all implementations: 4 x attended pairs x heads x dim
forward, and 2.5 times that backward. Softmax attention is compared with HSTU attention because it needs the same amount
of matrix operations. The upper bounds, a large matrix product and a device copy, are measured in the same run. Inputs
rotate, so that they are not in the cache. Long sequences are measured with full and with semi-local attention. Errors
are those of the output and of the gradients of q, k and v, compared with float64.

    nestrec bench attention --lengths u4096,lognormal:mean=900,max=8192,count=200 --heads 8x64 --impls nestrec
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from nestrec.base.config import config
from nestrec.base.errors import UserError
from nestrec.distributed.topology import check_device
from nestrec.jagged import offsets_of
from nestrec.ops.attention.hstu_attention import (
    NO_BIAS,
    hstu_attention,
    hstu_attention_padded,
    hstu_attention_reference,
)
from nestrec.ops.attention.hstu_op import batch_buckets
from nestrec.ops.attention.mask_and_bias import PLAIN, AttentionMask, RelativeBias, causal_pairs, semi_local
from nestrec.ops.padding import from_blocks, padded_indices, to_blocks
from nestrec_bench.bench import Bench
from nestrec_bench.harness.length_shapes import LENGTH_SHAPES, join_shapes, lengths_of
from nestrec_bench.kernels.kernel_timing import ceilings, medians_ms

SEMI_LOCAL = "nestrec_semi_local_1024_256"
WINDOW_AND_PREFIX = semi_local(1024, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """Attention inputs: bf16 vectors (T, H, D), the gradient of the output, and the jagged layout."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor
    offsets: torch.Tensor
    lengths: list[int]

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def normalizer(self) -> float:
        return float(self.longest)


class Attention:
    """Attention function with prepared inputs, and the mapping of its layout to tokens."""

    def __init__(
        self,
        call: Callable[..., torch.Tensor],
        inputs: list[torch.Tensor],
        grad: torch.Tensor,
        tokens: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
        bias: RelativeBias = NO_BIAS,
    ):
        self._call = call
        self._inputs = inputs
        self._grad = grad
        self.tokens = tokens
        self.bias = bias
        self._learned = [x for x in (bias.position_table, bias.time_table, bias.time_function) if x is not None]

    def forward(self) -> torch.Tensor:
        return self._call(*self._inputs)

    def backward(self, out: torch.Tensor) -> list[torch.Tensor]:
        """Compute all gradients, including those of biases, and return those of q, k and v in the function's layout."""
        return list(torch.autograd.grad(out, [*self._inputs, *self._learned], self._grad)[:3])


@dataclass(frozen=True, slots=True)
class Implementation:
    """Implementation of attention that is measured."""

    prepare: Callable[[AttentionBatch], Attention]
    is_softmax: bool
    rules: AttentionMask = PLAIN


def _ours(batch: AttentionBatch, *, position: bool = False, time: str = "", rules: AttentionMask = PLAIN) -> Attention:
    bias = _bias(batch, position, time)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return hstu_attention(
            q, k, v, batch.offsets, max_length=batch.longest, normalizer=batch.normalizer, bias=bias, rules=rules
        )

    return Attention(call, [batch.q, batch.k, batch.v], batch.grad, bias=bias)


def _bias(batch: AttentionBatch, position: bool, time: str) -> RelativeBias:
    """Return the biases, with one event per hour for the time bias."""
    generator = torch.Generator("cpu").manual_seed(0)
    time_T = torch.arange(len(batch.q), dtype=torch.float64, device=batch.q.device) * 3600.0

    def table(size: int) -> torch.Tensor:
        return (torch.randn(size, generator=generator) * 0.02).to(batch.q.device).requires_grad_()

    function = torch.tensor([0.1, 11.4, -0.7], device=batch.q.device, requires_grad=True)
    bias = RelativeBias(
        position_table=table(2 * batch.longest - 1) if position else None,
        time_table=table(129) if time == "table" else None,
        time_function=function if time == "function" else None,
        time_T=time_T,
        query_time_T=time_T,
    )
    return replace(bias, buckets=batch_buckets(batch.q.flatten(1), batch.offsets, batch.longest, bias))


def _eager(batch: AttentionBatch) -> Attention:
    _check_padded_scores_fit(batch, copies=6)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return hstu_attention_padded(q, k, v, batch.offsets, max_length=batch.longest, normalizer=batch.normalizer)

    return Attention(call, [batch.q, batch.k, batch.v], batch.grad)


def _check_padded_scores_fit(batch: AttentionBatch, *, copies: int) -> None:
    """Raise an error if the scores of the padded batch do not fit; an allocation attempt would fragment the memory."""
    num_bytes = copies * 2 * len(batch.lengths) * batch.q.shape[1] * batch.longest**2
    if num_bytes > 0.7 * torch.cuda.get_device_properties(batch.q.device).total_memory:
        raise torch.OutOfMemoryError(f"padded scores of {num_bytes / 2**30:.0f} GiB do not fit")


def _padded_sdpa(batch: AttentionBatch) -> Attention:
    index_T = padded_indices(batch.offsets, batch.q.shape[0], batch.longest)
    blocks = [
        to_blocks(x.detach(), index_T, len(batch.lengths), batch.longest)
        for x in (batch.q, batch.k, batch.v, batch.grad)
    ]

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    q, k, v, grad = blocks
    return Attention(call, [x.requires_grad_() for x in (q, k, v)], grad, lambda x: from_blocks(x, index_T))


def _varlen(batch: AttentionBatch) -> Attention:
    from torch.nn.attention.varlen import varlen_attn

    bounds = batch.offsets.to(torch.int32)
    has_flag = "is_causal" in inspect.signature(varlen_attn).parameters
    causal = {"is_causal": True} if has_flag else {"window_size": (-1, 0)}

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = varlen_attn(q, k, v, bounds, bounds, batch.longest, batch.longest, **causal)
        assert isinstance(out, torch.Tensor)
        return out

    return Attention(call, [batch.q, batch.k, batch.v], batch.grad)


def _flex(batch: AttentionBatch) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask

    tokens = batch.q.shape[0]
    rows = torch.arange(len(batch.lengths), device=batch.q.device)
    row_T = torch.repeat_interleave(rows, batch.offsets.diff(), output_size=tokens)

    def same_document(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (i >= j) & (row_T[i] == row_T[j])

    mask = create_block_mask(same_document, None, None, tokens, tokens, device="cuda", _compile=True)
    parts = [x.detach().transpose(0, 1)[None].contiguous() for x in (batch.q, batch.k, batch.v, batch.grad)]

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = _compiled_flex()(q, k, v, block_mask=mask)
        assert isinstance(out, torch.Tensor)
        return out

    q, k, v, grad = parts
    return Attention(call, [x.requires_grad_() for x in (q, k, v)], grad, lambda x: x[0].transpose(0, 1))


_FLEX: list[Callable[..., torch.Tensor]] = []


def _compiled_flex() -> Callable[..., torch.Tensor]:
    """Return flex_attention, compiled once for all shapes."""
    if not _FLEX:
        from torch.nn.attention.flex_attention import flex_attention

        _FLEX.append(torch.compile(flex_attention, dynamic=False))
    return _FLEX[0]


def _with(**biases: Any) -> Implementation:
    return Implementation(partial(_ours, **biases), is_softmax=False)


IMPLEMENTATIONS = {
    "nestrec": Implementation(_ours, is_softmax=False),
    "nestrec_position_bias": _with(position=True),
    "nestrec_position_time_bias": _with(position=True, time="table"),
    "nestrec_functional_time_bias": _with(time="function"),
    "nestrec_position_functional_bias": _with(position=True, time="function"),
    SEMI_LOCAL: Implementation(partial(_ours, rules=WINDOW_AND_PREFIX), is_softmax=False, rules=WINDOW_AND_PREFIX),
    "eager_hstu_padded": Implementation(_eager, is_softmax=False),
    "flex_attention": Implementation(_flex, is_softmax=True),
    "varlen_attn": Implementation(_varlen, is_softmax=True),
    "sdpa_padded": Implementation(_padded_sdpa, is_softmax=True),
}


BACKWARD = 2.5
"""Ratio of the FLOPs of the backward and forward passes: five matrix products to two."""
CHECKED_TOKENS = 16_384
"""Number of tokens on which errors are computed: complete sequences up to this total, or one truncated sequence."""

Row = dict[str, Any]


@config
class AttentionBenchConfig:
    """Options of the benchmark."""

    lengths: tuple[str, ...] = LENGTH_SHAPES
    """Sequence lengths: named shapes, uN, lognormal:mean=...,max=...,count=..., files of lengths, prepared datasets."""
    long_lengths: tuple[str, ...] = ("u16384", "u32768", "u65536")
    """Lengths at which full and semi-local attention are compared, with the heads of `peers_at`."""
    heads: tuple[str, ...] = ("4x128", "4x256", "4x64", "8x64")
    """Numbers of heads x head dimensions."""
    impls: tuple[str, ...] = tuple(IMPLEMENTATIONS)
    """Names of the implementations to measure."""
    peers_at: tuple[str, ...] = ("4x128",)
    """Heads with which the implementations of PyTorch are measured."""
    rounds: int = 15
    """Number of timed calls, whose median is reported."""
    input_sets: int = 2
    """Number of sets of inputs that are used alternately, so that they are not in the cache."""


def measure_attention(bench: AttentionBenchConfig) -> Iterator[Row]:
    """Measure every implementation with every shape, and yield one row each, after the rows of the upper bounds."""
    check_device("cuda")
    if unknown := set(bench.impls) - set(IMPLEMENTATIONS):
        remedy = f"choose from {', '.join(IMPLEMENTATIONS)}"
        raise UserError("unknown implementations", option="impls", value=sorted(unknown), remedy=remedy)
    yield from ceilings(bench.rounds)
    for heads in bench.heads:
        for name in bench.impls:
            for shape in _shapes(bench, name, heads):
                input_sets = [batch_of(lengths_of(shape).tolist(), heads, seed) for seed in range(bench.input_sets)]
                yield _row(name, shape, input_sets, bench.rounds)


def heads_and_dim(text: str) -> tuple[int, int]:
    """Parse a number of heads and a head dimension: `8x64` returns (8, 64)."""
    heads, _, dim = text.partition("x")
    if not (heads.isdigit() and dim.isdigit() and int(heads) * int(dim)):
        problem = "must be the number of heads and the head dimension"
        raise UserError(problem, option="heads", value=text, remedy="write, for example, 8x64")
    return int(heads), int(dim)


def flops_of(lengths: Sequence[int], heads: int, dim: int, name: str = "nestrec") -> float:
    """Return the FLOPs of exact causal attention in the forward pass."""
    rules = IMPLEMENTATIONS[name].rules
    return 4 * causal_pairs(np.array(lengths), rules.max_attention_length, rules.num_context) * heads * dim


def _shapes(bench: AttentionBenchConfig, name: str, heads: str) -> list[str]:
    is_of_nestrec = name.startswith("nestrec")
    is_semi_local = name == SEMI_LOCAL
    is_compared = heads in bench.peers_at
    usual = join_shapes(bench.lengths) if (is_of_nestrec or is_compared) and not is_semi_local else []
    return usual + (join_shapes(bench.long_lengths) if is_compared and name in ("nestrec", SEMI_LOCAL) else [])


def batch_of(lengths: list[int], heads_by_dim: str, seed: int, device: str = "cuda") -> AttentionBatch:
    """Return random attention inputs for sequences of these lengths."""
    heads, dim = heads_and_dim(heads_by_dim)
    generator = torch.Generator(device).manual_seed(seed)
    size = (sum(lengths), heads, dim)
    q, k, v, grad = (torch.randn(size, generator=generator, device=device).to(torch.bfloat16) for _ in range(4))
    return AttentionBatch(
        q=(q * dim**-0.5).requires_grad_(), k=k.requires_grad_(), v=v.requires_grad_(), grad=grad,
        offsets=offsets_of(torch.tensor(lengths)).to(device), lengths=lengths,
    )  # fmt: skip


def _row(name: str, shape: str, input_sets: Sequence[AttentionBatch], rounds: int) -> Row:
    impl = IMPLEMENTATIONS[name]
    batch = input_sets[0]
    tokens, heads, dim = batch.q.shape
    row: Row = {"impl": name, "heads": heads, "dim": dim, "lengths": shape, "tokens": tokens}
    try:
        attend = [impl.prepare(inputs) for inputs in input_sets]
        error = error_of(attend[0], batch, name)
        fwd_ms, bwd_ms = _times(attend, rounds)
    except RuntimeError as problem:
        torch.cuda.empty_cache()
        return row | {"fwd_ms": None, "bwd_ms": None, "tflops": None, "rel_err": None,
                      "note": f"{type(problem).__name__}: {str(problem).splitlines()[0][:160]}"}  # fmt: skip
    flops = flops_of(batch.lengths, heads, dim, name)
    return row | {
        "fwd_ms": round(fwd_ms, 4), "bwd_ms": round(bwd_ms, 4),
        "tflops": round((1 + BACKWARD) * flops / (fwd_ms + bwd_ms) / 1e9, 1),
        "rel_err": float(f"{error:.2e}"), "fwd_tflops": round(flops / fwd_ms / 1e9, 1),
        "bwd_tflops": round(BACKWARD * flops / bwd_ms / 1e9, 1), "is_softmax": impl.is_softmax,
    }  # fmt: skip


def _times(attend: Sequence[Attention], rounds: int) -> list[float]:
    """Return the median times of the forward and backward pass over rotating inputs, in milliseconds."""
    out: list[torch.Tensor] = []

    def forward(number: int) -> None:
        out[:] = [attend[number % len(attend)].forward()]

    return medians_ms([forward, lambda number: attend[number % len(attend)].backward(out[0])], rounds)


def error_of(attend: Attention, batch: AttentionBatch, name: str) -> float:
    """Return the largest relative error of the output and the gradients, compared with float64."""
    if min(batch.lengths) > CHECKED_TOKENS:
        batch = batch_of([CHECKED_TOKENS], f"{batch.q.shape[1]}x{batch.q.shape[2]}", seed=0, device=batch.q.device.type)
        attend = IMPLEMENTATIONS[name].prepare(batch)
    first, end = _checked_sequences(batch.lengths)
    rows = slice(int(batch.offsets[first]), int(batch.offsets[end]))
    out = attend.forward()
    found = [attend.tokens(x) for x in (out, *attend.backward(out))]
    q, k, v = inputs = [x.detach()[rows].double().requires_grad_() for x in (batch.q, batch.k, batch.v)]
    offsets = batch.offsets[first : end + 1] - batch.offsets[first]
    if IMPLEMENTATIONS[name].is_softmax:
        outs = _softmax_reference(inputs, offsets)
    else:
        outs = hstu_attention_reference(
            q, k, v, offsets, normalizer=batch.normalizer, bias=_exact_bias(attend.bias, rows),
            rules=IMPLEMENTATIONS[name].rules,
        )  # fmt: skip
    exact = [outs, *torch.autograd.grad(outs, inputs, batch.grad[rows].double())]
    pairs = zip(found, exact, strict=True)
    return max(float(((a[rows].double() - b).norm() / b.norm()).detach()) for a, b in pairs)


def _exact_bias(bias: RelativeBias, rows: slice) -> RelativeBias:
    names = [name for name in RelativeBias.__slots__ if name != "buckets"]
    tensors = {name: x.detach().double() for name in names if (x := getattr(bias, name)) is not None}
    return RelativeBias(**{name: x[rows] if name.endswith("_T") else x for name, x in tensors.items()})


def _checked_sequences(lengths: Sequence[int]) -> tuple[int, int]:
    """Return a range of sequences [first, end), beginning with the shortest, that is small enough for float64."""
    first = int(np.argmin(lengths))
    end = first + 1
    while end < len(lengths) and sum(lengths[first : end + 1]) <= CHECKED_TOKENS:
        end += 1
    return first, end


def _softmax_reference(inputs: list[torch.Tensor], offsets: torch.Tensor) -> torch.Tensor:
    """Compute causal softmax attention with the usual scale."""
    outputs = []
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        q, k, v = (x[start:end].transpose(0, 1) for x in inputs)
        seen = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device).tril()
        weights = (q * q.shape[2] ** -0.5 @ k.transpose(1, 2)).masked_fill(~seen, float("-inf")).softmax(-1)
        outputs.append((weights @ v).transpose(0, 1))
    return torch.cat(outputs)


BENCH = Bench(config=AttentionBenchConfig, measure=measure_attention)
