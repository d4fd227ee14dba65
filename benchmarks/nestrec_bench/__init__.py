"""Reproducible benchmarks of nestrec."""
