"""Online inference server with relay-race ranking (RelayGR): candidates are scored against the KV cache of a user's
history, which is prefilled ahead of the ranking request."""
