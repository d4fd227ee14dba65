"""Dropout whose mask is a pure function of (token key, site, channel), so that a sample may run anywhere.

    y[t, c] = x[t, c] / (1 - p)   where   u24(key[t], site, c) >= p * 2**24,   else 0

Legend: T tokens, D channels.
"""

from dataclasses import dataclass

import torch

from nestrec.base.random import mix64, uniform24


@dataclass(frozen=True, slots=True)
class Dropout:
    """One dropout of a forward pass, as the kernels take it."""

    key_T: torch.Tensor
    """int64 keys of the tokens"""
    site: int
    """tells apart the dropouts of one forward pass"""
    probability: float

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        return dropout(x_TD, self.key_T, self.site, self.probability)

    def arguments(self) -> tuple[torch.Tensor | None, int, int, float]:
        """(key or none, site key, threshold, scale) of the row kernels."""
        if self.probability == 0.0:
            return None, 0, 0, 1.0
        key = mix64(self.site)
        site = key - (1 << 64) if key >> 63 else key
        return self.key_T, site, _threshold(self.probability), 1.0 / (1.0 - self.probability)


def keep_mask(key_T: torch.Tensor, site: int, num_channels: int, probability: float) -> torch.Tensor:
    """(T, D) bool: True where a value is kept."""
    return uniform24(key_T, site, num_channels) >= _threshold(probability)


def dropout(x_TD: torch.Tensor, key_T: torch.Tensor, site: int, probability: float) -> torch.Tensor:
    """Dropout with the mask of `keep_mask`; `site` tells apart the dropouts of one forward pass."""
    if probability == 0.0:
        return x_TD
    keep = keep_mask(key_T, site, x_TD.shape[1], probability)
    return torch.where(keep, x_TD * (1.0 / (1.0 - probability)), 0.0)


def _threshold(probability: float) -> int:
    return round(probability * (1 << 24))
