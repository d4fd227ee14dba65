"""Losses over items: whole catalogue, sampled, grouped; each variant the same numbers at another price."""
