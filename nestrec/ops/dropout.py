"""Dropout whose mask is a pure function of (token key, site, channel), so that a sample may run anywhere.

    y[t, c] = x[t, c] / (1 - p)   where   u24(key[t], site, c) >= p * 2**24,   else 0

Legend: T tokens, D channels.
"""

import torch

from nestrec.base.random import uniform24


def keep_mask(key_T: torch.Tensor, site: int, num_channels: int, probability: float) -> torch.Tensor:
    """(T, D) bool: True where a value is kept."""
    return uniform24(key_T, site, num_channels) >= round(probability * (1 << 24))


def dropout(x_TD: torch.Tensor, key_T: torch.Tensor, site: int, probability: float) -> torch.Tensor:
    """Dropout with the mask of `keep_mask`; `site` tells apart the dropouts of one forward pass."""
    if probability == 0.0:
        return x_TD
    keep = keep_mask(key_T, site, x_TD.shape[1], probability)
    return torch.where(keep, x_TD * (1.0 / (1.0 - probability)), 0.0)
