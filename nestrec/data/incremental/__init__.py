"""Incremental datasets: events are appended in layers, and each new generation is committed atomically."""
