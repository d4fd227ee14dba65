"""Benchmarks of kernels, stores and exchanges, compared with PyTorch and with a plain copy."""
