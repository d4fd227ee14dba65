"""Server security: API keys, roles, rate limits, TLS certificates, and checks of the listening address."""
