"""Synthetic logs as a pure function of a seed."""
