"""Whole training steps: time, memory, negatives."""
