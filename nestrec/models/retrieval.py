"""Next-item retrieval: an encoder, and the similarity between its states and item vectors.

Legend: T tokens, U rows, D channels, R negatives, N items of the catalogue.
"""

import torch
from torch import nn

from nestrec.base.bounds import Positive
from nestrec.base.config import config
from nestrec.models.backbones import EncoderConfig, make_encoder
from nestrec.models.features import ToWidth
from nestrec.models.prefix_tokens import states_behind, with_room
from nestrec.models.sequence import SequenceInfo
from nestrec.ops.layers.unit_rows import unit_rows
from nestrec.ops.rows.stored import StoredRows, TableRows

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
        self.encoder, self.dim = make_encoder(with_room(encoder, num_prefix)), encoder.dim
        self.similarity = similarity
        self.to_width = ToWidth(encoder.dim, {})
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
        whole_UD = row_UD.whole() if isinstance(row_UD, StoredRows) else row_UD
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
