"""Attentions that the attention benchmark compares: ours, and what torch offers.

Each is prepared once for a batch (masks, padding, offsets: what a training loop would also make once a batch), then
timed. Backward is that of the attention alone, given the gradient of its output.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from nestrec.ops.attention.hstu import NO_BIAS, hstu_attention, hstu_attention_padded
from nestrec.ops.attention.hstu_op import batch_buckets
from nestrec.ops.attention.mask import PLAIN, AttentionRules, semi_local
from nestrec.ops.attention.relative_bias import RelativeBias
from nestrec.ops.padding import from_blocks, padded_places, to_blocks

SEMI_LOCAL = "nestrec_semi_local_1024_256"
WINDOW_AND_PREFIX = semi_local(1024, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """bf16 vectors (T, H, D), the gradient of the output, and the layout."""

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
    def normaliser(self) -> float:
        return float(self.longest)


class Attention:
    """A function of prepared inputs, and how its layout maps to tokens."""

    def __init__(
        self,
        call: Callable[..., torch.Tensor],
        inputs: list[torch.Tensor],
        grad: torch.Tensor,
        tokens: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
        bias: RelativeBias = NO_BIAS,
    ):
        self._call, self._inputs, self._grad, self.tokens, self.bias = call, inputs, grad, tokens, bias
        self._learned = [x for x in (bias.position_table, bias.time_table, bias.time_function) if x is not None]

    def forward(self) -> torch.Tensor:
        return self._call(*self._inputs)

    def backward(self, out: torch.Tensor) -> list[torch.Tensor]:
        """Gradients of q, k and v in the attention's own layout; those of biases are computed too."""
        return list(torch.autograd.grad(out, [*self._inputs, *self._learned], self._grad)[:3])


@dataclass(frozen=True, slots=True)
class Implementation:
    prepare: Callable[[AttentionBatch], Attention]
    is_softmax: bool
    rules: AttentionRules = PLAIN


def _ours(batch: AttentionBatch, *, position: bool = False, time: str = "", rules: AttentionRules = PLAIN) -> Attention:
    bias = _bias(batch, position, time)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return hstu_attention(
            q, k, v, batch.offsets, max_length=batch.longest, normaliser=batch.normaliser, bias=bias, rules=rules
        )

    return Attention(call, [batch.q, batch.k, batch.v], batch.grad, bias=bias)


def _bias(batch: AttentionBatch, position: bool, time: str) -> RelativeBias:
    """An event an hour."""
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
    _refuse_large_squares(batch, copies=6)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return hstu_attention_padded(q, k, v, batch.offsets, max_length=batch.longest, normaliser=batch.normaliser)

    return Attention(call, [batch.q, batch.k, batch.v], batch.grad)


def _refuse_large_squares(batch: AttentionBatch, *, copies: int) -> None:
    """Scores of the padded batch would not fit, and trying would only fragment the memory."""
    needed = copies * 2 * len(batch.lengths) * batch.q.shape[1] * batch.longest**2
    if needed > 0.7 * torch.cuda.get_device_properties(batch.q.device).total_memory:
        raise torch.OutOfMemoryError(f"padded scores of {needed / 2**30:.0f} GiB do not fit")


def _padded_sdpa(batch: AttentionBatch) -> Attention:
    place_T = padded_places(batch.offsets, batch.q.shape[0], batch.longest)
    blocks = [
        to_blocks(x.detach(), place_T, len(batch.lengths), batch.longest)
        for x in (batch.q, batch.k, batch.v, batch.grad)
    ]

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    q, k, v, grad = blocks
    return Attention(call, [x.requires_grad_() for x in (q, k, v)], grad, lambda x: from_blocks(x, place_T))


def _varlen(batch: AttentionBatch) -> Attention:
    from torch.nn.attention.varlen import varlen_attn

    bounds = batch.offsets.to(torch.int32)
    has_flag = "is_causal" in inspect.signature(varlen_attn).parameters
    causal = {"is_causal": True} if has_flag else {"window_size": (-1, 0)}

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found = varlen_attn(q, k, v, bounds, bounds, batch.longest, batch.longest, **causal)
        assert isinstance(found, torch.Tensor)
        return found

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
        found = _compiled_flex()(q, k, v, block_mask=mask)
        assert isinstance(found, torch.Tensor)
        return found

    q, k, v, grad = parts
    return Attention(call, [x.requires_grad_() for x in (q, k, v)], grad, lambda x: x[0].transpose(0, 1))


_FLEX: list[Callable[..., torch.Tensor]] = []


def _compiled_flex() -> Callable[..., torch.Tensor]:
    """Compiled once for all shapes."""
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
