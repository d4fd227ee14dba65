"""What stands around attention in a layer: norms, projections, gates, dropout, inputs."""
