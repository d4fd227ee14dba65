"""Offline inference: recommendations and embeddings for many users, and `nestrec.load`."""
