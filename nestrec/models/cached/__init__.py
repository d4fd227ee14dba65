"""Backbones over kept prefixes: sequence by sequence, which is the definition, and over pages, batches at once."""
