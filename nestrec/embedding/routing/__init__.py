"""Routing of the keys, embedding vectors and gradients of a batch between ranks."""
