"""What a token is compared with besides its positive, and at what price.

Legend: T tokens, R negatives drawn for a token, K others whose negatives it meets too, D channels.
"""

from collections.abc import Mapping
from typing import Literal

import torch

from nestrec.base.bounds import Count, NonNegative, Positive
from nestrec.base.config import config
from nestrec.ops.losses.candidates import LossCandidates, make_candidates
from nestrec.ops.losses.sampled import Variant


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
