"""Engines behind a router, version swaps, reloads, cold-start items."""
