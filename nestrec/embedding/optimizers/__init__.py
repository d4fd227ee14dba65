"""Row optimisers: each its formula, as a definition, and the same as a fused host loop and in one kernel."""
