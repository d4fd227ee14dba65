"""Prefixes kept for a later request: pages, tiers, trigger and expander."""
