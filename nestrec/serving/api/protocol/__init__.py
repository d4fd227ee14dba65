"""HTTP under limits: connections, heads, bodies, and the short way of a whole request."""
