"""Kernels, stores and exchanges, each beside what torch offers and beside a plain copy."""
