"""Multi-task ranking on interleaved item and action tokens (the ranking form of HSTU).

    tokens: content_0, action_0, content_1, action_1, ...      the label of event i is predicted at content_i

A content token is the sum of the vectors of the event's item, context and features; an action token is the sum of the
vectors of the bits that are set. At content_i the model sees content 0..i and actions 0..i-1, never action i.

Legend: E events, T = 2E tokens, D channels, K tasks, A action bits.
"""

import torch
from torch import nn

from nestrec.base.bounds import Count
from nestrec.base.config import config
from nestrec.models.backbones import EncoderConfig, make_encoder
from nestrec.models.dlrm import Interactions, mlp
from nestrec.models.features import ToWidth
from nestrec.models.prefix_tokens import states_behind, with_room
from nestrec.models.sequence import SequenceInfo


@config
class HeadConfig:
    hidden: tuple[Count, ...] = (64,)
    """hidden widths of the network from the state to the logits"""
    interactions: bool = False
    """it also reads the dot products of all pairs of an event's vectors, as a DLRM does: item, features, lists"""


class RankingModel(nn.Module):
    to_width: ToWidth
    """of tables whose vectors have another width than the model"""

    def __init__(
        self,
        encoder: EncoderConfig,
        head: HeadConfig,
        *,
        num_tasks: int,
        num_action_bits: int,
        num_prefix: int = 0,
        num_features: int = 0,
    ):
        """num_prefix: tokens that stand before every history. num_features: vectors of which a content is the sum, for
        a head that reads their interactions."""
        super().__init__()
        self.encoder = make_encoder(with_room(encoder, num_prefix))
        self.action = nn.Parameter(torch.empty(num_action_bits, encoder.dim).normal_(std=0.02))
        self.head = mlp(head_width(encoder.dim, head, num_features), *head.hidden, num_tasks)
        self.interactions = Interactions(num_features) if head.interactions else None
        self.to_width = ToWidth(encoder.dim, {})

    def forward(
        self,
        content_ED: torch.Tensor,
        action_E: torch.Tensor,
        info: SequenceInfo,
        prefix_BPD: torch.Tensor | None = None,
        feature_ECD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(E, K) logits. `info` describes the 2E tokens; `action_E` holds the bits of each event; `prefix_BPD` is what
        stands before each history; `feature_ECD` what the content of each event is made of."""
        bit = torch.arange(self.action.shape[0], device=action_E.device)
        is_set_EA = (action_E[:, None] >> bit) & 1
        action_ED = is_set_EA.to(self.action.dtype) @ self.action
        tokens_TD = torch.stack([content_ED, action_ED], dim=1).flatten(0, 1)
        state_ED = states_behind(self.encoder, tokens_TD, info, prefix_BPD)[0::2]
        read = [state_ED, content_ED]
        if self.interactions is not None and feature_ECD is not None:
            read.append(self.interactions(feature_ECD))
        return self.head(torch.cat(read, dim=1))  # type: ignore[no-any-return]


def head_width(dim: int, head: HeadConfig, num_features: int) -> int:
    """Numbers that the head reads of an event."""
    return 2 * dim + (num_features * (num_features - 1) // 2 if head.interactions else 0)
