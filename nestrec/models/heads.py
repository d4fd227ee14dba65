"""Retrieval and ranking models on top of an encoder, and options of negative sampling.

- `RetrievalModel` predicts the next item: the logits are similarities between the encoder's states and item embeddings.
  Training compares a positive item with sampled negatives (`NegativesConfig`).
- `RankingModel` is a multi-task ranking model over interleaved content and action tokens (the ranking form of HSTU):

    tokens: content_0, action_0, content_1, action_1, ...      the labels of event i are predicted at content_i

  A content token is the sum of the embeddings of the event's item, context and features; an action token is the sum of
  the embeddings of its action bits. content_i attends to the contents 0..i and the actions 0..i-1, never to action i.

Legend: T tokens (2E in ranking), E events, D model width, R negatives per token, U rows of the item table; K is the
number of tasks in ranking, and the number of other tokens whose negatives are shared in retrieval.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import nn

from nestrec.base.config import config
from nestrec.base.config_values import Count, NonNegative, Positive
from nestrec.models.backbone_registry import EncoderConfig, make_encoder
from nestrec.models.dlrm import Interactions, mlp
from nestrec.models.encoder_parts import FeatureProjections, encode_with_prefix, reserve_prefix
from nestrec.models.sequence import SequenceInfo
from nestrec.ops.embedding.row_gather import HalfPrecisionRows, TableRows
from nestrec.ops.layers.token_input import unit_rows
from nestrec.ops.losses.item_losses import LossCandidates, make_candidates
from nestrec.ops.losses.sampled_losses import Variant


@config
class NegativesConfig:
    """Negative sampling and its loss, for retrieval."""

    num_negatives: Count = 128
    """Number of negatives drawn per token, with replacement."""
    sampler: Literal["uniform", "popularity", "in_batch", "groups"] = "uniform"
    """Distribution of negatives: `uniform` over items; `popularity`, proportional to the number of events; `in_batch`,
    targets of other tokens of the micro-batch, which need no lookup; `groups`, the targets of a random group of
    num_negatives + 1 tokens, which is cheapest."""
    popularity_power: NonNegative = 1.0
    """Exponent of the event counts for `sampler=popularity`; 0.75 flattens the distribution, 0 makes it uniform over
    the items with events."""
    log_q: bool = True
    """Whether logits get the logQ correction (minus the log of the sampling probability); `sampler=uniform` does not
    need it."""
    logit_sharing: Count = 1
    """Number of tokens, itself included, whose negatives a token is compared with (logit sharing of TurboGR). The
    number of logits grows by this factor; no additional rows are looked up."""
    scope: Literal["micro_batch", "batch"] = "micro_batch"
    """Tokens from which `in_batch`, `groups` and logit sharing take negatives: those of the micro-batch, or those of a
    rank's batch, which must then be a single micro-batch."""
    loss_variant: Variant | Literal["auto"] = "plain"
    """Implementation of the loss: `plain` stores all vectors of negatives; `segments` gathers them twice; `fused` never
    stores them; `offload` stores them in host memory; `auto` measures at the start and selects the fastest that fits.
    With `loss=full`, all but `plain` compute in tiles."""
    segment_tokens: Count = 512
    """Number of tokens whose vectors are in memory at a time, for `loss_variant` segments and offload."""
    max_memory_gib: Positive | None = None
    """Maximum memory of the loss in GiB, for `loss_variant=auto`. None: a quarter of the device memory."""
    lookup_dtype: Literal["full", "bfloat16", "float16"] = "full"
    """Data type in which rows that are used only as negatives are looked up and sent between ranks; gradients are sent
    in full precision."""


def candidates_of(index: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> LossCandidates:
    """Return the positives and negatives of a micro-batch.

    Args:
        index: Indices of looked-up rows, per feature.
        tensors: Tensors that the collator added to the micro-batch.
    """
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
    """Head of a ranking model."""

    hidden_dims: tuple[Count, ...] = (64,)
    """Hidden widths of the MLP from the state to the logits."""
    interactions: bool = False
    """Whether the head also reads the dot products of all pairs of an event's embeddings (item, features, lists), as in
    a DLRM."""


class RankingModel(nn.Module):
    """Multi-task ranking model over interleaved content and action tokens.

    Args:
        encoder: Config of the encoder.
        head: Config of the head.
        num_tasks: Number of logits per event.
        num_action_bits: Number of different actions; an action token is a bit set.
        num_prefix: Number of prefix tokens before every history.
        num_features: Number of embeddings that are summed to a content token, if the head reads their interactions.
    """

    to_width: FeatureProjections
    """Projections for tables whose embeddings are not as wide as the model."""

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
        super().__init__()
        self.encoder = make_encoder(reserve_prefix(encoder, num_prefix))
        self.action = nn.Parameter(torch.empty(num_action_bits, encoder.dim).normal_(std=0.02))
        self.head = mlp(head_width(encoder.dim, head, num_features), *head.hidden_dims, num_tasks)
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
        """Return the (E, K) logits.

        Args:
            content_ED: Content vector of each event.
            action_E: Action bits of each event.
            info: Layout of the 2E tokens.
            prefix_BPD: Vectors of the prefix tokens of each history.
            feature_ECD: Embeddings that were summed to the content vectors, for a head with interactions.
        """
        bit = torch.arange(self.action.shape[0], device=action_E.device)
        is_set_EA = (action_E[:, None] >> bit) & 1
        action_ED = is_set_EA.to(self.action.dtype) @ self.action
        tokens_TD = torch.stack([content_ED, action_ED], dim=1).flatten(0, 1)
        state_ED = encode_with_prefix(self.encoder, tokens_TD, info, prefix_BPD)[0::2]
        read = [state_ED, content_ED]
        if self.interactions is not None and feature_ECD is not None:
            read.append(self.interactions(feature_ECD))
        return self.head(torch.cat(read, dim=1))  # type: ignore[no-any-return]


def head_width(dim: int, head: HeadConfig, num_features: int) -> int:
    """Return the number of inputs of the head per event."""
    return 2 * dim + (num_features * (num_features - 1) // 2 if head.interactions else 0)


UNIT_EPS = 1e-6


@config
class SimilarityConfig:
    """Similarity of states and item embeddings, for retrieval."""

    normalize: bool = True
    """Whether states and item vectors are scaled to length one (cosine similarity)."""
    temperature: Positive = 0.05
    """Temperature: divisor of the dot products."""


class RetrievalModel(nn.Module):
    """Next-item retrieval model: its outputs (queries) multiplied with item vectors are the logits of the next item.

    Args:
        encoder: Config of the encoder.
        similarity: Normalization and temperature.
        num_prefix: Number of prefix tokens before every history.
    """

    def __init__(self, encoder: EncoderConfig, similarity: SimilarityConfig, num_prefix: int = 0):
        super().__init__()
        self.encoder = make_encoder(reserve_prefix(encoder, num_prefix))
        self.dim = encoder.dim
        self.similarity = similarity
        self.to_width = FeatureProjections(encoder.dim, {})
        """Projections for tables whose embeddings are not as wide as the model."""

    def forward(
        self, history_TD: torch.Tensor, info: SequenceInfo, prefix_BPD: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the (T, D) queries, already divided by the temperature.

        Args:
            history_TD: Vectors of the history tokens.
            info: Layout of the histories, without prefix tokens.
            prefix_BPD: Vectors of the prefix tokens of each history.
        """
        state_TD = encode_with_prefix(self.encoder, history_TD, info, prefix_BPD)
        return self._scale(state_TD, 1.0 / self.similarity.temperature)

    def item_rows(self, row_UD: TableRows) -> TableRows:
        """Return rows of the item table, projected to the width of the model, as inputs for histories."""
        if not self.to_width.projects("items"):
            return row_UD
        float_UD = row_UD.to_float32() if isinstance(row_UD, HalfPrecisionRows) else row_UD
        return self.to_width("items", float_UD)  # type: ignore[no-any-return]

    def item_vectors(self, row_UD: torch.Tensor) -> torch.Tensor:
        """Return item vectors for the similarity: `row_UD`, scaled to length one if `similarity.normalize` is set."""
        return self._scale(row_UD, 1.0)

    def loss_rows(self, row_UD: TableRows) -> TableRows:
        """Same as `item_vectors`, but for losses, which read 16-bit rows as they are stored."""
        return unit_rows(row_UD, 1.0, UNIT_EPS) if self.similarity.normalize else row_UD

    def _scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        if self.similarity.normalize:
            return unit_rows(x, factor, UNIT_EPS)
        return x if factor == 1.0 else x * factor
