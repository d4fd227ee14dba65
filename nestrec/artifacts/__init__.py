"""Storage backends, sealed manifests, delta chains: shared by checkpoints and published versions."""
