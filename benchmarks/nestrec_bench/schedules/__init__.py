"""Benchmarks of pipeline schedules over limited links or an emulated fabric."""
