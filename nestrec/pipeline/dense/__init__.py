"""Optimizer of the dense (data-parallel or FSDP) weights, and their gradient all-reduce."""
