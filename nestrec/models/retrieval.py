"""Next-item retrieval: an encoder, and the similarity between its states and item vectors.

Legend: T tokens, U rows, D channels, R negatives, N items of the catalogue.
"""

import torch
from torch import nn
from torch.nn.functional import normalize

from nestrec.base.config import config
from nestrec.models.hstu import HSTU, HSTUConfig
from nestrec.models.sasrec import SASRec, SASRecConfig
from nestrec.models.sequence import SequenceInfo

EncoderConfig = HSTUConfig | SASRecConfig


@config
class SimilarityConfig:
    normalise: bool = True
    """states and item vectors are scaled to length one"""
    temperature: float = 0.05
    """dot products are divided by it"""


def make_encoder(cfg: EncoderConfig) -> nn.Module:
    return HSTU(cfg) if isinstance(cfg, HSTUConfig) else SASRec(cfg)


class RetrievalModel(nn.Module):
    """States of the tokens that, multiplied with item vectors, give the logits of the next item."""

    def __init__(self, encoder: EncoderConfig, similarity: SimilarityConfig):
        super().__init__()
        self.encoder = make_encoder(encoder)
        self.similarity = similarity

    def forward(self, history_TD: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
        """(T, D) queries; the temperature is already in them."""
        state_TD = self.encoder(history_TD, info)
        return self.item_vectors(state_TD) / self.similarity.temperature

    def item_vectors(self, row_UD: torch.Tensor) -> torch.Tensor:
        """Rows of the item table as the similarity sees them."""
        return normalize(row_UD, dim=1, eps=1e-6) if self.similarity.normalise else row_UD
