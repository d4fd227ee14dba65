"""HSTU attention on Hopper GPUs: persistent, warp-specialised kernels and their launches."""
