"""Synthetic logs, a pure function of a seed."""
