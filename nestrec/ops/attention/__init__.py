"""Attention over jagged sequences: the definitions, Triton kernels, and the paths that serving takes."""
