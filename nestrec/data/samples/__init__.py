"""Samples: splits, training chunks, model inputs and negative sampling for each task."""
