"""Benchmarks of the simulator: comparisons with measured and published results, and calibration."""
