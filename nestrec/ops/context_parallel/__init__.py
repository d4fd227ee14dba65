"""Attention over sequences whose tokens are divided over the ranks of a group."""
