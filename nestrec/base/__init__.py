"""Base layer: configs and overrides, errors, plugins, files, threads, CUDA helpers and counter-based random numbers."""
