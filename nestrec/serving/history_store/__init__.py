"""Events that the server keeps, for requests that bring no history."""
