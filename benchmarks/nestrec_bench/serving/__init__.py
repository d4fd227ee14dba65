"""Benchmarks of serving under load."""
