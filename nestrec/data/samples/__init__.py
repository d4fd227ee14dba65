"""Samples: what of a dataset a step trains on, split, cut and with negatives."""
