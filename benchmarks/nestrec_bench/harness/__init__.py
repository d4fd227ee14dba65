"""Shared tools of the benchmarks: local ranks, emulated and limited links, lengths, clocks, random models."""
