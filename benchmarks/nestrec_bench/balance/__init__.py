"""Balance of samples over ranks and micro-batches."""
