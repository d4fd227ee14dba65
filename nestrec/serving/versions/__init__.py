"""Published model versions: full versions and deltas that a training run publishes and that servers follow."""
