"""Several instances on one machine behind one address: a gateway of our own, or Ray Serve."""
