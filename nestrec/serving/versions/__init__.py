"""Versions of a model that follow each other: written by a run as it goes on, read by servers that follow it."""
