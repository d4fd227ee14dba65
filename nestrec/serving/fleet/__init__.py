"""Fleet of server instances on one machine behind one load balancer: our own gateway or Ray Serve."""
