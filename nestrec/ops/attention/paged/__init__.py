"""Attention of new tokens over a paged KV cache, on a GPU."""
