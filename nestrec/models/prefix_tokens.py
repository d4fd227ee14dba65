"""Tokens that stand before a history: what is known of its user, one token a feature.

    P prefix tokens, then the tokens of the history; no state of a prefix token is asked for

They are causal as all others: a prefix that looked ahead would tell the first event of a sample what its last ones are,
and a sample asks at every position. Where attention has a window they are seen beside it, as `attention.prefix` is.

Legend: T tokens of histories, B sequences, P prefix tokens, D channels, N = T + B P.
"""

from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from nestrec.base.errors import UserError
from nestrec.base.random import GOLDEN64
from nestrec.models.backbone import SequenceConfig
from nestrec.models.sequence import SequenceInfo

ConfigT = TypeVar("ConfigT", bound=SequenceConfig)
_STEP = GOLDEN64 - (1 << 64)
"""As a signed number: what the keys of prefix tokens differ by."""


def with_room(cfg: ConfigT, num_prefix: int) -> ConfigT:
    """The config of an encoder for sequences with so many tokens before them."""
    if num_prefix == 0:
        return cfg
    more = {"max_length": cfg.max_length + num_prefix}
    reach = getattr(cfg, "attention", None)
    if reach is not None and reach.window is not None:
        more["attention"] = replace(reach, prefix=reach.prefix + num_prefix)
    return replace(cfg, **more)  # type: ignore[type-var]


def states_behind(
    encoder: nn.Module, token_TD: torch.Tensor, info: SequenceInfo, prefix_BPD: torch.Tensor | None
) -> torch.Tensor:
    """(T, D) states of the tokens of histories that begin with these."""
    if prefix_BPD is None:
        return _states(encoder, token_TD, info)
    (num_sequences, num_prefix, _), device = prefix_BPD.shape, token_TD.device
    sequence_T = torch.searchsorted(info.offsets, torch.arange(len(token_TD), device=device), right=True) - 1
    place_T = torch.arange(len(token_TD), device=device) + num_prefix * (sequence_T + 1)
    first_B = info.offsets[:-1] + num_prefix * torch.arange(num_sequences, device=device)
    place_BP = first_B[:, None] + torch.arange(num_prefix, device=device)

    def joined(of_prefix: torch.Tensor, of_tokens: torch.Tensor) -> torch.Tensor:
        out = of_tokens.new_empty(len(token_TD) + num_sequences * num_prefix, *of_tokens.shape[1:])
        out = out.index_copy(0, place_BP.reshape(-1), of_prefix.reshape(-1, *of_tokens.shape[1:]).to(out.dtype))
        return out.index_copy(0, place_T, of_tokens)

    def of_first(of_tokens: torch.Tensor) -> torch.Tensor:
        """(B, P) what the first token of each sequence has."""
        return of_tokens[info.offsets[:-1].clamp(max=len(token_TD) - 1), None].expand(-1, num_prefix)

    number_P = torch.arange(num_prefix, device=device)
    longer = replace(
        info,
        offsets=info.offsets + num_prefix * torch.arange(num_sequences + 1, device=device),
        max_length=info.max_length + num_prefix,
        position_T=joined(number_P.expand(num_sequences, -1), info.position_T + num_prefix),
        token_key_T=joined(of_first(info.token_key_T) + (number_P + 1) * _STEP, info.token_key_T),
        time_T=None if info.time_T is None else joined(of_first(info.time_T), info.time_T),
        query_time_T=None if info.time_T is None or info.query_time_T is None
        else joined(of_first(info.time_T), info.query_time_T),
        cut_B=None if info.cut_B is None else info.cut_B + num_prefix,
    )  # fmt: skip
    return _states(encoder, joined(prefix_BPD, token_TD), longer).index_select(0, place_T)


def _states(encoder: nn.Module, token_TD: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
    """What an encoder makes of tokens; one of another package may give something else, which would fail far from it."""
    states_TD = encoder(token_TD, info)
    if not isinstance(states_TD, torch.Tensor) or states_TD.shape != token_TD.shape:
        shape = tuple(states_TD.shape) if isinstance(states_TD, torch.Tensor) else type(states_TD).__name__
        remedy = (
            f"let its forward(tokens, info) return a tensor of shape {tuple(token_TD.shape)}, a state for each token"
        )
        raise UserError(f"gives {shape}", field="encoder", value=type(encoder).__name__, remedy=remedy)
    return states_TD
