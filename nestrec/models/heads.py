"""Heads and scores of retrieval and ranking models, with their negatives.

What a token is compared with besides its positive, and at what price.

Legend: T tokens, R negatives drawn for a token, K others whose negatives it meets too, D channels.

Multi-task ranking on interleaved item and action tokens (the ranking form of HSTU).

    tokens: content_0, action_0, content_1, action_1, ...      the label of event i is predicted at content_i

A content token is the sum of the vectors of the event's item, context and features; an action token is the sum of the
vectors of the bits that are set. At content_i the model sees content 0..i and actions 0..i-1, never action i.

Legend: E events, T = 2E tokens, D channels, K tasks, A action bits.

Next-item retrieval: an encoder, and the similarity between its states and item vectors.

Legend: T tokens, U rows, D channels, R negatives, N items of the catalogue.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import nn

from nestrec.base.config import config
from nestrec.base.config_values import Count, NonNegative, Positive
from nestrec.models.backbone_registry import EncoderConfig, make_encoder
from nestrec.models.dlrm import Interactions, mlp
from nestrec.models.encoder_parts import FeatureProjections, states_behind, with_room
from nestrec.models.sequence import SequenceInfo
from nestrec.ops.embedding.row_gather import HalfPrecisionRows, TableRows
from nestrec.ops.layers.token_input import unit_rows
from nestrec.ops.losses.item_losses import LossCandidates, make_candidates
from nestrec.ops.losses.sampled_losses import Variant


@config
class NegativesConfig:
    sampler: Literal["uniform", "popularity", "in_batch", "groups"] = "uniform"
    """items alike, in proportion to their events, or targets of other tokens of the micro-batch (nothing looked up):
    drawn for each token, or (groups) those of a random group of num_negatives + 1 tokens, which costs least"""
    popularity_power: NonNegative = 1.0
    """popularity: events are raised to it; 0.75 flattens, 0 is uniform over the items that were seen"""
    log_q: bool = True
    """all but uniform: logits are corrected by the log of how often an item is drawn"""
    sharing: Count = 1
    """k: a token also meets the negatives of k - 1 other tokens of its micro-batch, drawn for each token. k times the
    logits, and no row more is looked up"""
    reach: Literal["micro_batch", "batch"] = "micro_batch"
    """in_batch, groups and sharing: the other tokens are those of the micro-batch, or all that a rank trains in a step,
    which then must be one micro-batch"""
    variant: Variant | Literal["auto"] = "plain"
    """plain keeps all vectors of negatives; segments gathers them twice; fused never stores them; offload keeps them in
    host memory; auto measures at the start and takes the fastest that fits. Of loss=full: all but plain by tiles"""
    segment_tokens: Count = 512
    """segments and offload: tokens whose vectors are in memory at a time"""
    memory_gib: Positive | None = None
    """auto: what the loss may take; none is a quarter of the device's memory"""
    lookup: Literal["full", "bfloat16", "float16"] = "full"
    """type in which rows that are only negatives are looked up and sent between ranks; gradients stay full"""


def candidates_of(index: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> LossCandidates:
    """Positives and negatives of a micro-batch, out of what was looked up and what its assembler has added."""
    positive_T = index["positive"]
    token_TR = tensors.get("negative_token")
    if token_TR is None:
        negative_TR = index["negative"]
    else:
        negative_TR = positive_T.index_select(0, token_TR.reshape(-1)).view(token_TR.shape)
    return make_candidates(
        positive_T, negative_TR, bias_TR=tensors.get("negative_bias"), shared_TK=tensors.get("shared_token")
    )


@config
class HeadConfig:
    hidden: tuple[Count, ...] = (64,)
    """hidden widths of the network from the state to the logits"""
    interactions: bool = False
    """it also reads the dot products of all pairs of an event's vectors, as a DLRM does: item, features, lists"""


class RankingModel(nn.Module):
    to_width: FeatureProjections
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
        self.to_width = FeatureProjections(encoder.dim, {})

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


UNIT_EPS = 1e-6


@config
class SimilarityConfig:
    normalise: bool = True
    """states and item vectors are scaled to length one"""
    temperature: Positive = 0.05
    """dot products are divided by it"""


class RetrievalModel(nn.Module):
    """States of the tokens that, multiplied with item vectors, give the logits of the next item."""

    def __init__(self, encoder: EncoderConfig, similarity: SimilarityConfig, num_prefix: int = 0):
        """num_prefix: tokens that stand before every history."""
        super().__init__()
        self.encoder = make_encoder(with_room(encoder, num_prefix))
        self.dim = encoder.dim
        self.similarity = similarity
        self.to_width = FeatureProjections(encoder.dim, {})
        """of tables whose vectors have another width than the model"""

    def forward(
        self, history_TD: torch.Tensor, info: SequenceInfo, prefix_BPD: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(T, D) queries; the temperature is already in them. prefix_BPD: what stands before each history."""
        state_TD = states_behind(self.encoder, history_TD, info, prefix_BPD)
        return self._scaled(state_TD, 1.0 / self.similarity.temperature)

    def item_rows(self, row_UD: TableRows) -> TableRows:
        """Rows of the item table in the model's width, as histories hold them."""
        if not self.to_width.changes("items"):
            return row_UD
        whole_UD = row_UD.whole() if isinstance(row_UD, HalfPrecisionRows) else row_UD
        return self.to_width("items", whole_UD)  # type: ignore[no-any-return]

    def item_vectors(self, row_UD: torch.Tensor) -> torch.Tensor:
        """The same as the similarity sees them."""
        return self._scaled(row_UD, 1.0)

    def compared_rows(self, row_UD: TableRows) -> TableRows:
        """The same for losses, which read rows of 16 bits as they are stored."""
        return unit_rows(row_UD, 1.0, UNIT_EPS) if self.similarity.normalise else row_UD

    def _scaled(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        if self.similarity.normalise:
            return unit_rows(x, factor, UNIT_EPS)
        return x if factor == 1.0 else x * factor
