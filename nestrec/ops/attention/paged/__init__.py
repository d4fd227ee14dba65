"""Attention of new tokens against prefixes that lie in pages, on a GPU."""
