"""Operators of transformer layers other than attention: norms, projections, gates, dropout and token inputs."""
