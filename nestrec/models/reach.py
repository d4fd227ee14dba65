"""How far attention of HSTU and FuXi reaches in each layer: a whole history, a window and a prefix, or the last tokens.

    window, prefix       token i sees the tokens from i - window + 1 to itself, and the first `prefix` ones: the cost of
                         a layer grows with the length, not with its square (semi-local attention)
    keep_last            from layer `keep_from` on, only the last tokens of a history go on: the states of the others
                         are those of the layers before (truncation between layers)

Both as ULTRA-HSTU (2602.16986) describes them. The cut of a history of n tokens is

    cut(n) = max(0, floor((n - keep_last) / keep_step) * keep_step)

so between keep_last and keep_last + keep_step - 1 tokens are left. What later layers compute depends on the cut, and on
n only through it: keys and values that are kept of a prefix hold for every history with the same cut. A prefix that
stood before it is not seen behind it.

Legend: T tokens, B sequences.
"""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.bounds import Count, Natural
from nestrec.base.config import config
from nestrec.base.errors import UserError
from nestrec.models.sequence import SequenceInfo
from nestrec.ops.attention.mask import AttentionRules, semi_local


@config
class AttentionReach:
    """Of the layers of a model."""

    window: Count | None = None
    """tokens that one sees, itself included; none: all before it"""
    prefix: Natural = 0
    """first tokens of a history that all later ones see beside their window"""
    full_layers: Natural = 0
    """first layers that see everything, whatever the window is"""
    keep_last: Count | None = None
    """last tokens of a history that layers from keep_from on compute; none: all"""
    keep_from: Count = 1
    """layers before a history is cut to its last tokens"""
    keep_step: Count = 64
    """tokens that the cut moves by: prefixes that serving keeps are computed anew each time it moves"""

    def check(self, num_layers: int) -> None:
        """Refuses what would do nothing in a model of so many layers."""
        if self.window is None and (self.prefix or self.full_layers):
            field = "prefix" if self.prefix else "full_layers"
            raise UserError(
                "means nothing without a window",
                field=f"attention.{field}",
                value=getattr(self, field),
                remedy="give attention.window",
            )
        for field, is_used in (("full_layers", self.window), ("keep_from", self.keep_last)):
            if is_used is not None and getattr(self, field) >= max(num_layers, 1):
                raise UserError(
                    f"leaves none of {num_layers} layers",
                    field=f"attention.{field}",
                    value=getattr(self, field),
                    remedy=f"give less than {num_layers}",
                )

    def whole_only(self) -> str | None:
        """Why it needs whole sequences on one rank; none where parts of them will do."""
        return None if self.keep_last is None else "attention.keep_last cuts sequences anew between layers"

    @property
    def is_full(self) -> bool:
        """Whether every layer sees everything."""
        return self.window is None and self.keep_last is None

    def cuts(self, layer: int) -> bool:
        """Whether a layer computes the last tokens only."""
        return self.keep_last is not None and layer >= self.keep_from

    def rules(self, layer: int) -> AttentionRules:
        """Who sees whom in a layer; the prefix of a history does not reach those that compute its last tokens."""
        is_local = layer >= self.full_layers
        return semi_local(self.window if is_local else None, 0 if self.cuts(layer) else self.prefix)

    def most_seen(self, layer: int, max_length: int) -> int:
        """Tokens that one sees at most in a layer."""
        rules, most = self.rules(layer), max_length
        if self.cuts(layer) and self.keep_last is not None:
            most = min(most, self.keep_last + self.keep_step - 1)
        window = rules.max_attention_length
        return most if window is None else min(most, window + rules.num_context)

    def limits(self, num_layers: int, max_length: int) -> list[int]:
        """`most_seen` of every layer; none where all of them see everything."""
        return [] if self.is_full else [self.most_seen(layer, max_length) for layer in range(num_layers)]

    def cut(self, length: int) -> int:
        """First token of a history that is left behind the cut."""
        return int(self.cut_of(np.array(length)))

    def cut_of(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """The same of many."""
        if self.keep_last is None:
            return np.zeros_like(lengths)
        return np.maximum((lengths - self.keep_last) // self.keep_step * self.keep_step, 0)


FULL = AttentionReach()


def cut_sequences(reach: AttentionReach, info: SequenceInfo) -> tuple[torch.Tensor, SequenceInfo]:
    """(T',) the tokens that are left, and what is known of their sequences. It waits for the device, to count them."""
    assert reach.keep_last is not None
    lengths_B, cut_B, most = info.offsets.diff(), info.cut_B, info.max_length
    if cut_B is None:
        steps_B = (lengths_B - reach.keep_last).div(reach.keep_step, rounding_mode="floor")
        cut_B, most = (steps_B * reach.keep_step).clamp(min=0), reach.keep_last + reach.keep_step - 1
    cut_T = torch.repeat_interleave(cut_B, lengths_B, output_size=len(info.position_T))
    kept = torch.nonzero(info.position_T >= cut_T).squeeze(1)
    return kept, replace(
        info,
        offsets=torch.cat([info.offsets[:1], (lengths_B - cut_B).cumsum(0)]),
        max_length=min(info.max_length, most),
        position_T=info.position_T[kept],
        token_key_T=info.token_key_T[kept],
        time_T=None if info.time_T is None else info.time_T[kept],
        query_time_T=None if info.query_time_T is None else info.query_time_T[kept],
        cut_B=None,
    )
