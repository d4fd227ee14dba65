"""Built-in row optimizers; each has a formula as the reference implementation, a fused host loop and one kernel."""
