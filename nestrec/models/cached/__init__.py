"""Backbones with a KV cache: reference implementations (sequence by sequence), and batched ones over a paged cache."""
