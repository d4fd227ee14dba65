"""Inference service: engines and their router, model swaps and reloads, following of versions, cold-start items."""
