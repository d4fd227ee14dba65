"""Artifact storage shared by checkpoints and published versions: storage backends, manifests with digests, delta
chains.
"""
