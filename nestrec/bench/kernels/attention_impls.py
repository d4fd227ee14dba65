"""Attentions that the attention benchmark compares: ours, and what torch offers.

Each is prepared once for a batch (masks, padding, offsets: what a training loop would also make once a batch), then
timed. Backward is that of the attention alone, given the gradient of its output.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from nestrec.ops.attention.hstu import hstu_attention, hstu_attention_padded
from nestrec.ops.attention.relative_bias import RelativeBias
from nestrec.ops.padding import from_blocks, padded_slots, to_blocks


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
        tables: tuple[torch.Tensor, ...] = (),
    ):
        self._call, self._inputs, self._grad, self.tokens, self._tables = call, inputs, grad, tokens, tables

    def forward(self) -> torch.Tensor:
        return self._call(*self._inputs)

    def backward(self, out: torch.Tensor) -> list[torch.Tensor]:
        """Gradients of q, k and v in the attention's own layout; those of tables are computed too."""
        return list(torch.autograd.grad(out, [*self._inputs, *self._tables], self._grad)[:3])


@dataclass(frozen=True, slots=True)
class Implementation:
    prepare: Callable[[AttentionBatch], Attention]
    is_softmax: bool


def _ours(batch: AttentionBatch) -> Attention:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return hstu_attention(q, k, v, batch.offsets, max_length=batch.longest, normaliser=batch.normaliser)

    return Attention(call, [batch.q, batch.k, batch.v], batch.grad)


def _ours_with_bias(batch: AttentionBatch, *, has_time: bool) -> Attention:
    """Tables of zeros cost what others do, and leave the results comparable."""
    device, tokens = batch.q.device, batch.q.shape[0]
    position = torch.zeros(2 * batch.longest - 1, device=device, requires_grad=True)
    time = torch.zeros(129, device=device, requires_grad=True) if has_time else None
    time_T = torch.arange(tokens, device=device, dtype=torch.float64) * 3600.0
    bias = RelativeBias(position_table=position, time_table=time, time_T=time_T, query_time_T=time_T)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return hstu_attention(q, k, v, batch.offsets, max_length=batch.longest, normaliser=batch.normaliser, bias=bias)

    tables = (position,) if time is None else (position, time)
    return Attention(call, [batch.q, batch.k, batch.v], batch.grad, tables=tables)


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
    slot_T = padded_slots(batch.offsets, batch.q.shape[0], batch.longest)
    blocks = [
        to_blocks(x.detach(), slot_T, len(batch.lengths), batch.longest)
        for x in (batch.q, batch.k, batch.v, batch.grad)
    ]

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    q, k, v, grad = blocks
    return Attention(call, [x.requires_grad_() for x in (q, k, v)], grad, lambda x: from_blocks(x, slot_T))


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


IMPLEMENTATIONS = {
    "nestrec": Implementation(_ours, is_softmax=False),
    "nestrec_position_bias": Implementation(partial(_ours_with_bias, has_time=False), is_softmax=False),
    "nestrec_position_time_bias": Implementation(partial(_ours_with_bias, has_time=True), is_softmax=False),
    "eager_hstu_padded": Implementation(_eager, is_softmax=False),
    "flex_attention": Implementation(_flex, is_softmax=True),
    "varlen_attn": Implementation(_varlen, is_softmax=True),
    "sdpa_padded": Implementation(_padded_sdpa, is_softmax=True),
}
