"""HSTU attention on this GPU against what torch offers, with the ceilings of a matrix product and a copy.

FLOPs are those of exact causal attention over valid tokens, whoever computes it: forward 2 sum(L (L + 1)) heads dim,
backward 2.5 times that. Softmax attentions stand in for HSTU's, as the same amount of matrix work. The ceilings, a
large matrix product and a device copy, are measured in the same run. Inputs rotate, so that no run finds them in the
cache.

    nestrec bench attention --shapes u4096,logn --heads 4x128 --impls nestrec
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nestrec.base.config import config
from nestrec.bench.bench import Bench
from nestrec.bench.kernels.attention_impls import IMPLEMENTATIONS, Attention, AttentionBatch
from nestrec.data.synthetic.length_shapes import LENGTH_SHAPES, lengths_of
from nestrec.distributed.topology import check_device
from nestrec.jagged import offsets_of
from nestrec.ops.attention.hstu import hstu_attention_reference

BACKWARD = 2.5
"""FLOPs of the backward over those of the forward pass: five matrix products over two."""
CHECKED_TOKENS = 16_384
"""Errors are taken over whole sequences of at most so many tokens together, or the shortest one."""

Rows = list[dict[str, Any]]


@config
class AttentionBench:
    """What is measured."""

    shapes: tuple[str, ...] = LENGTH_SHAPES
    """named length shapes"""
    heads: tuple[str, ...] = ("4x128", "4x256", "4x64", "8x64")
    """heads x dimension of a head"""
    impls: tuple[str, ...] = tuple(IMPLEMENTATIONS)
    """implementations"""
    peers_at: tuple[str, ...] = ("4x128",)
    """the others are measured at these heads only"""
    rounds: int = 15
    """timed calls, of which the median counts"""
    input_sets: int = 2
    """rotating inputs"""


def measure_attention(bench: AttentionBench, keep: Callable[[Rows], None] = lambda rows: None) -> Rows:
    """Rows of the bench: ceilings first, then every implementation at every shape. `keep` sees them after each."""
    check_device("cuda")
    rows: Rows = _ceilings(bench.rounds)
    for heads_by_dim in bench.heads:
        heads, dim = (int(n) for n in heads_by_dim.split("x"))
        for name in bench.impls:
            if name == "nestrec" or heads_by_dim in bench.peers_at:
                for shape in bench.shapes:
                    sets = [_batch(shape, heads, dim, seed) for seed in range(bench.input_sets)]
                    rows.append(_row(name, shape, sets, bench.rounds))
                    keep(rows)
    return rows


def flops_of(lengths: Sequence[int], heads: int, dim: int) -> float:
    """Of the forward pass, exact and causal."""
    return float(2 * sum(n * (n + 1) for n in lengths) * heads * dim)


def _batch(shape: str, heads: int, dim: int, seed: int) -> AttentionBatch:
    lengths = lengths_of(shape)
    generator = torch.Generator("cuda").manual_seed(seed)
    size = (int(lengths.sum()), heads, dim)
    q, k, v, grad = (torch.randn(size, generator=generator, device="cuda").to(torch.bfloat16) for _ in range(4))
    return AttentionBatch(
        q=(q * dim**-0.5).requires_grad_(), k=k.requires_grad_(), v=v.requires_grad_(), grad=grad,
        offsets=offsets_of(torch.from_numpy(lengths)).cuda(), lengths=lengths.tolist(),
    )  # fmt: skip


def _row(name: str, shape: str, sets: Sequence[AttentionBatch], rounds: int) -> dict[str, Any]:
    batch = sets[0]
    tokens, heads, dim = batch.q.shape
    row: dict[str, Any] = {"impl": name, "heads": heads, "dim": dim, "lengths": shape, "tokens": tokens}
    try:
        attend = [IMPLEMENTATIONS[name].prepare(each) for each in sets]
        error = _error(attend[0], batch, is_softmax=IMPLEMENTATIONS[name].is_softmax)
        times = _times(attend, rounds)
    except RuntimeError as problem:
        torch.cuda.empty_cache()
        return row | {"fwd_ms": None, "bwd_ms": None, "tflops": None, "rel_err": None,
                      "note": f"{type(problem).__name__}: {str(problem).splitlines()[0][:160]}"}  # fmt: skip
    flops = flops_of(batch.lengths, heads, dim)
    return row | {
        "fwd_ms": round(times.forward_ms, 4), "bwd_ms": round(times.backward_ms, 4),
        "tflops": round((1 + BACKWARD) * flops / (times.forward_ms + times.backward_ms) / 1e9, 1),
        "rel_err": float(f"{error:.2e}"), "fwd_tflops": round(flops / times.forward_ms / 1e9, 1),
        "bwd_tflops": round(BACKWARD * flops / times.backward_ms / 1e9, 1),
        "is_softmax": IMPLEMENTATIONS[name].is_softmax,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Times:
    forward_ms: float
    backward_ms: float


def _times(attend: Sequence[Attention], rounds: int) -> _Times:
    """Medians over rotating inputs."""
    forward_ms, backward_ms = [], []
    for n in range(rounds + 3):
        call = attend[n % len(attend)]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        # Work ahead of the first mark hides the time that the host takes to launch.
        torch.cuda._sleep(5_000_000)
        marks[0].record()
        out = call.forward()
        marks[1].record()
        call.backward(out)
        marks[2].record()
        torch.cuda.synchronize()
        if n >= 3:
            forward_ms.append(marks[0].elapsed_time(marks[1]))
            backward_ms.append(marks[1].elapsed_time(marks[2]))
    return _Times(statistics.median(forward_ms), statistics.median(backward_ms))


def _error(attend: Attention, batch: AttentionBatch, *, is_softmax: bool) -> float:
    """The largest of the relative errors of output and gradients, against float64."""
    first, end = _checked(batch.lengths)
    rows = slice(int(batch.offsets[first]), int(batch.offsets[end]))
    out = attend.forward()
    found = [attend.tokens(x) for x in (out, *attend.backward(out))]
    exact_inputs = [x.detach()[rows].double().requires_grad_() for x in (batch.q, batch.k, batch.v)]
    offsets = batch.offsets[first : end + 1] - batch.offsets[first]
    reference = _softmax_reference if is_softmax else _hstu_reference
    outs = reference(exact_inputs, offsets, batch.normaliser)
    exact = [outs, *torch.autograd.grad(outs, exact_inputs, batch.grad[rows].double())]
    pairs = zip(found, exact, strict=True)
    return max(float(((a[rows].double() - b).norm() / b.norm()).detach()) for a, b in pairs)


def _checked(lengths: Sequence[int]) -> tuple[int, int]:
    """A run of sequences [first, end) around the shortest that is small enough for float64."""
    first = int(np.argmin(lengths))
    end = first + 1
    while end < len(lengths) and sum(lengths[first : end + 1]) <= CHECKED_TOKENS:
        end += 1
    return first, end


def _hstu_reference(inputs: list[torch.Tensor], offsets: torch.Tensor, normaliser: float) -> torch.Tensor:
    q, k, v = inputs
    return hstu_attention_reference(q, k, v, offsets, normaliser=normaliser)


def _softmax_reference(inputs: list[torch.Tensor], offsets: torch.Tensor, normaliser: float) -> torch.Tensor:
    """Causal softmax attention with the usual scale."""
    outputs = []
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        q, k, v = (x[start:end].transpose(0, 1) for x in inputs)
        seen = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device).tril()
        weights = (q * q.shape[2] ** -0.5 @ k.transpose(1, 2)).masked_fill(~seen, float("-inf")).softmax(-1)
        outputs.append((weights @ v).transpose(0, 1))
    return torch.cat(outputs)


def _ceilings(rounds: int) -> Rows:
    """A large matrix product and a large copy."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul_ms = _median_ms(lambda: a @ b, rounds)
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    copy_ms = _median_ms(lambda: target.copy_(source), rounds)
    return [
        {"impl": "bf16 matmul 8192^3 (ceiling)", "tflops": round(2 * size**3 / matmul_ms / 1e9, 1), "ms": matmul_ms},
        {"impl": "device copy (ceiling)", "gb_per_s": round(2 * source.nbytes / copy_ms / 1e6, 1), "ms": copy_ms},
    ]


def _median_ms(call: Callable[[], object], rounds: int) -> float:
    found = []
    for n in range(rounds + 3):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        call()
        marks[1].record()
        torch.cuda.synchronize()
        if n >= 3:
            found.append(marks[0].elapsed_time(marks[1]))
    return float(round(statistics.median(found), 4))


BENCH = Bench(config=AttentionBench, measure=measure_attention)
