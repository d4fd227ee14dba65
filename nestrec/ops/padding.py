"""Jagged tokens in padded blocks and back, without a device synchronisation."""

import torch


def padded_places(offsets: torch.Tensor, num_tokens: int, max_length: int) -> torch.Tensor:
    """(T,) index of each token in the flattened (B * max_length) block."""
    token = torch.arange(num_tokens, device=offsets.device)
    row = torch.bucketize(token, offsets[1:], right=True)
    return token - offsets[row] + row * max_length


def to_blocks(x_THD: torch.Tensor, place_T: torch.Tensor, num_rows: int, max_length: int) -> torch.Tensor:
    """(T, H, D) to (B, H, N, D), zeros behind the end of each sequence."""
    _, heads, dim = x_THD.shape
    flat = x_THD.new_zeros(num_rows * max_length, heads, dim).index_copy(0, place_T, x_THD)
    return flat.view(num_rows, max_length, heads, dim).transpose(1, 2)


def from_blocks(x_BHND: torch.Tensor, place_T: torch.Tensor) -> torch.Tensor:
    """(B, H, N, D) to (T, H, D)."""
    return x_BHND.transpose(1, 2).flatten(0, 1).index_select(0, place_T)
