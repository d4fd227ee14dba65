"""Several instances on one machine behind one address: a gateway of our own, nginx, or Ray Serve."""
