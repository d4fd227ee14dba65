"""Ring attention of HSTU, FuXi and SASRec (context parallelism): each rank has a part of every sequence.

    HSTU      sum_j SiLU(q_i . k_j + bias) / normalizer v_j              a plain sum over keys
    FuXi      same as HSTU without a bias, and sums of values by distance and by time
    SASRec    sum_j e_ij v_j / sum_j e_ij,  e_ij = exp(q_i . k_j / sqrt(D) - top_i)

The keys of SASRec circulate twice: first for `top_i`, the largest score of a query, then for both sums. The softmax
does not depend on `top_i`, so `top_i` has no gradient.

Legend: T tokens of this rank, G sequences of a block, N queries, M keys, H heads, D head dimension, W = H D.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import silu

from nestrec.base.errors import UserError
from nestrec.ops.attention.hstu_attention import NO_BIAS
from nestrec.ops.attention.mask_and_bias import (
    PLAIN,
    AttentionMask,
    RelativeBias,
    functional_time_bias,
    table_values,
    time_bias,
)
from nestrec.ops.context_parallel.ring_sum import ContextParallelGroup, Tokens, ring_sum, ring_walk
from nestrec.ops.context_parallel.token_partition import Block, blocks_of

_TIMES = frozenset({"time", "query_time"})


def hstu_attention_in_context(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    context: ContextParallelGroup,
    *,
    normalizer: float,
    bias: RelativeBias = NO_BIAS,
    rules: AttentionMask = PLAIN,
) -> torch.Tensor:
    """Return the (T, H, D) result of `hstu_attention` for the tokens of this part. Collective."""
    _check(q_THD, context, bias, rules)
    function = SiluSum(normalizer, rules)
    return ring_sum(function, context, *_tokens(q_THD, k_THD, v_THD, bias), _parameters(bias))


def fuxi_attention_in_context(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    context: ContextParallelGroup,
    *,
    normalizer: float,
    bias: RelativeBias,
    rules: AttentionMask = PLAIN,
) -> tuple[torch.Tensor, ...]:
    """Return the (T, W) semantic, positional and, if the bias has times, temporal channels of this part. Collective."""
    _check(q_THD, context, bias, rules)
    function = ChannelSums(normalizer, rules, 3 if bias.has_time else 2)
    channels_TCW = ring_sum(function, context, *_tokens(q_THD, k_THD, v_THD, bias), _parameters(bias))
    return channels_TCW.unbind(1)


def softmax_attention_in_context(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, context: ContextParallelGroup
) -> torch.Tensor:
    """Return the (T, H, D) result of `softmax_attention` for the tokens of this part. Collective."""
    _check(q_THD, context, NO_BIAS, PLAIN)
    top_TH = _largest_scores(q_THD.detach(), k_THD.detach(), context)
    queries, keys = {"q": q_THD, "top": top_TH}, {"k": k_THD, "v": v_THD}
    sums = ring_sum(ExponentialSums(), context, queries, keys, {})
    return sums[:, :, :-1] / sums[:, :, -1:]


@dataclass(frozen=True, slots=True)
class SiluSum:
    """Attention function of HSTU; the result per query is (H, D)."""

    normalizer: float
    rules: AttentionMask = PLAIN
    fixed: frozenset[str] = _TIMES

    def width(self, queries: Tokens, keys: Tokens) -> Sequence[int]:
        return keys["v"].shape[1:]

    def __call__(self, queries: Tokens, keys: Tokens, block: Block, parameters: Tokens) -> torch.Tensor:
        scores = torch.einsum("gnhd,gmhd->ghnm", queries["q"], keys["k"])
        for bias_GNM in _biases(queries, keys, block, parameters):
            scores = scores + bias_GNM.to(scores.dtype)[:, None]
        weights = torch.where(block.attention_mask(self.rules)[:, None], silu(scores), 0.0) / self.normalizer
        return torch.einsum("ghnm,gmhd->gnhd", weights, keys["v"])


@dataclass(frozen=True, slots=True)
class ChannelSums:
    """Attention function of FuXi; the result per query is (channels, W)."""

    normalizer: float
    rules: AttentionMask
    num_channels: int
    fixed: frozenset[str] = _TIMES

    def width(self, queries: Tokens, keys: Tokens) -> Sequence[int]:
        return self.num_channels, keys["v"].shape[1] * keys["v"].shape[2]

    def __call__(self, queries: Tokens, keys: Tokens, block: Block, parameters: Tokens) -> torch.Tensor:
        semantic = SiluSum(self.normalizer, self.rules)(queries, keys, block, {}).flatten(2)
        seen_GNM = block.attention_mask(self.rules)
        v_GMW = keys["v"].flatten(2)
        others = [
            torch.where(seen_GNM, bias_GNM, 0.0).to(v_GMW.dtype) @ v_GMW
            for bias_GNM in _biases(queries, keys, block, parameters)
        ]
        return torch.stack([semantic, *others], dim=2)


@dataclass(frozen=True, slots=True)
class ExponentialSums:
    """Attention function of SASRec; the result per query is (H, D + 1): sum of weighted values and sum of weights."""

    rules: AttentionMask = PLAIN
    fixed: frozenset[str] = frozenset({"top"})

    def width(self, queries: Tokens, keys: Tokens) -> Sequence[int]:
        return keys["v"].shape[1], keys["v"].shape[2] + 1

    def __call__(self, queries: Tokens, keys: Tokens, block: Block, parameters: Tokens) -> torch.Tensor:
        top_GHN = queries["top"].transpose(1, 2)
        weights = (_scores(queries, keys, block) - top_GHN[:, :, :, None]).exp()
        sums = torch.einsum("ghnm,gmhd->gnhd", weights, keys["v"])
        return torch.cat([sums, weights.sum(3).transpose(1, 2)[:, :, :, None]], dim=3)


def _scores(queries: Tokens, keys: Tokens, block: Block) -> torch.Tensor:
    """Return the (G, H, N, M) scaled attention scores; -inf for masked pairs."""
    scores: torch.Tensor = torch.einsum("gnhd,gmhd->ghnm", queries["q"], keys["k"]) / queries["q"].shape[-1] ** 0.5
    return scores.masked_fill(~block.attention_mask(PLAIN)[:, None], -torch.inf)


def _largest_scores(q_THD: torch.Tensor, k_THD: torch.Tensor, context: ContextParallelGroup) -> torch.Tensor:
    """Return the (T, H) maximum score of each query over all visible keys. Collective."""
    top_TH = torch.full_like(q_THD[:, :, 0], -torch.inf, memory_format=torch.contiguous_format)
    with torch.autocast(q_THD.device.type, enabled=False):
        for part, keys in ring_walk(context, {"k": k_THD}):
            for block in blocks_of(context.parts, context.part, part, PLAIN, q_THD.device):
                queries = {"q": block.queries.take(q_THD)}
                largest_GHN = _scores(queries, {"k": block.keys.take(keys["k"])}, block).amax(3)
                tokens = block.queries.tokens
                largest = block.queries.flat(largest_GHN.transpose(1, 2))
                top_TH[tokens] = torch.maximum(top_TH[tokens], largest)
    return top_TH


def _biases(queries: Tokens, keys: Tokens, block: Block, parameters: Tokens) -> list[torch.Tensor]:
    """Return the (G, N, M) biases by distance and by time, for those that are configured."""
    biases = []
    if "position_table" in parameters:
        table = parameters["position_table"]
        center = (table.numel() - 1) // 2
        biases.append(table_values(table, block.distance().clamp(min=-center) + center))
    if "time_table" in parameters:
        biases.append(time_bias(parameters["time_table"], queries["query_time"], keys["time"]))
    if "time_function" in parameters:
        biases.append(functional_time_bias(parameters["time_function"], queries["query_time"], keys["time"]))
    return biases


def _tokens(q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, bias: RelativeBias) -> tuple[Tokens, Tokens]:
    queries, keys = {"q": q_THD}, {"k": k_THD, "v": v_THD}
    if bias.has_time:
        assert bias.query_time_T is not None
        assert bias.time_T is not None
        queries["query_time"] = bias.query_time_T
        keys["time"] = bias.time_T
    return queries, keys


def _parameters(bias: RelativeBias) -> Tokens:
    named = {name: getattr(bias, name) for name in ("position_table", "time_table", "time_function")}
    return {name: table for name, table in named.items() if table is not None}


def _check(q_THD: torch.Tensor, context: ContextParallelGroup, bias: RelativeBias, rules: AttentionMask) -> None:
    if rules.num_targets_B is not None or rules.is_square:
        raise UserError(
            "context parallelism does not support candidates or prefixes with bidirectional attention",
            option="rules",
            value=rules,
            remedy="use a causal mask without candidates, or disable context parallelism",
        )
    num_tokens = context.parts.num_tokens(context.part)
    if len(q_THD) != num_tokens:
        raise UserError(
            f"must have the {num_tokens} tokens of this rank's part", option="q, k, v", value=tuple(q_THD.shape)
        )
    table = bias.position_table
    longest = int(context.parts.lengths.max(initial=0))
    if table is not None and table.numel() < 2 * longest - 1:
        raise UserError(
            f"the table is too small for sequences of {longest} tokens",
            option="position_table",
            value=table.numel(),
            remedy=f"provide at least {2 * longest - 1} values",
        )
