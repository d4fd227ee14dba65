"""Config, overrides, errors, clock, fail points, counter-based random numbers."""
