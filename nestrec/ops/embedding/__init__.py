"""Operators on embedding rows: deduplicate keys, gather, pool, sum gradients, update, copy, search."""
