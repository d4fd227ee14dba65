"""Conversion between jagged and padded tokens, without a device synchronization."""

import torch


def padded_indices(offsets: torch.Tensor, num_tokens: int, max_length: int) -> torch.Tensor:
    """Return the (T,) index of each token in a padded tensor flattened to (B * max_length)."""
    token = torch.arange(num_tokens, device=offsets.device)
    row = torch.bucketize(token, offsets[1:], right=True)
    return token - offsets[row] + row * max_length


def to_blocks(x_THD: torch.Tensor, index_T: torch.Tensor, num_rows: int, max_length: int) -> torch.Tensor:
    """Convert jagged (T, H, D) values to padded (B, H, N, D) values, with zeros after the end of each sequence."""
    _, heads, dim = x_THD.shape
    flat = x_THD.new_zeros(num_rows * max_length, heads, dim).index_copy(0, index_T, x_THD)
    return flat.view(num_rows, max_length, heads, dim).transpose(1, 2)


def from_blocks(x_BHND: torch.Tensor, index_T: torch.Tensor) -> torch.Tensor:
    """Convert padded (B, H, N, D) values to jagged (T, H, D) values."""
    return x_BHND.transpose(1, 2).flatten(0, 1).index_select(0, index_T)
