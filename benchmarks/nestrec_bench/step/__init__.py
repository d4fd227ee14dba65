"""Benchmarks of complete training steps: time, memory and negatives."""
