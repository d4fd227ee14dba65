"""Attention over jagged sequences: reference implementations, Triton kernels, and KV-cache attention for serving."""
