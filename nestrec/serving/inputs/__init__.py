"""Request schemas, and the way from a request to what the engine computes."""
