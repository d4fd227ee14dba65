"""HSTU attention on Hopper GPUs: persistent, warp-specialized Gluon kernels and their launches."""
