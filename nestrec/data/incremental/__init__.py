"""Datasets that grow: events are appended in layers, and a generation appears whole or not at all."""
