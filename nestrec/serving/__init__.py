"""Export, and the relay: ranking of candidates against a user's prefix that was computed early and kept."""
