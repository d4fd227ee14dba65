"""Benchmarks of model quality, and of the speed of data preparation."""
