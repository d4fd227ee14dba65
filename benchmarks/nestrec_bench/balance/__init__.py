"""Benchmarks of balancing and clustering samples over ranks and micro-batches."""
